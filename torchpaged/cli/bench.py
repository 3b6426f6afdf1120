"""What ``torchpaged bench`` offers: its options, typed; the work is in ``torchpaged.bench``, imported when a
benchmark runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="Benchmarks; the last line of stdout is one JSON document, all else goes to stderr.",
)


@app.callback()
def _group() -> None:
    """Keeps ``attention`` a subcommand while it is the only one."""


@app.command()
def attention(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "all, decode, decode-fp8, speculative, prefill, prefill-fp8, mixed, block-size, smoke; may "
                "be given several times; default: decode"
            )
        ),
    ] = None,
    case: Annotated[str, typer.Option(help="keep cases whose name contains this")] = "",
    backends: Annotated[
        str,
        typer.Option(
            help="own backends, separated by commas; default: those for the device, without the reference"
        ),
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="fp32, bf16, fp16 for queries and caches; default: the cases' own")
    ] = "",
    repeats: Annotated[int, typer.Option(help="samples per contender at least")] = 24,
    bandwidth: Annotated[float | None, typer.Option(help="memory ceiling in TB/s; default: measured")] = None,
    flop_rate: Annotated[
        float | None, typer.Option(help="compute ceiling in TFLOP/s; default: measured")
    ] = None,
    output: Annotated[str, typer.Option(help="write the document to this JSON file, after every case")] = "",
    json_only: Annotated[
        bool, typer.Option("--json-only", help="print the JSON line and nothing else")
    ] = False,
) -> None:
    """Paged attention on this machine, backends side by side: checked against a float32 oracle, then timed in
    turns. Against other libraries, in a checkout: benchmarks/bench_attention.py."""
    from torchpaged.bench.attention import Options, exit_code, run, split

    options = Options(
        suites=tuple(suite or ("decode",)),
        case=case,
        backends=split(backends) or None,
        device=device,
        dtype=dtype,
        repeats=repeats,
        bandwidth=bandwidth,
        flop_rate=flop_rate,
        output=output,
        json_only=json_only,
    )
    document = run(options)
    print(json.dumps(document), flush=True)
    raise typer.Exit(exit_code(document))
