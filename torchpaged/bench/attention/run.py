"""Attention against its peers, as one function and as ``python -m torchpaged.bench.attention`` (needs
torch only).

    document = run(Options(suites=("decode",), peers=True))

For every case: inputs on the device, each contender checked against the float32 oracle, those that pass timed
in turns. A contender that can't run, is wrong or fails is reported as that and never left out. ``document``
holds the conditions, one row per case and a summary; `main` prints it as one JSON line on stdout, and
everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchpaged.bench import conditions, timing
from torchpaged.bench.attention.case import free_memory, measure_case
from torchpaged.bench.attention.cases import SUITES, select_cases
from torchpaged.bench.attention.contender import Contender
from torchpaged.bench.attention.contenders import contenders
from torchpaged.bench.attention.in_parts import in_parts_of
from torchpaged.bench.attention.summary import exit_code, summarise
from torchpaged.bench.screen import Screen
from torchpaged.custom_ops.errors import ArgumentError, TorchpagedError
from torchpaged.names import device_named, short_dtype

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        suites: names in ``cases.SUITES``; "all" = every suite but smoke.
        case: keep the cases whose name contains this.
        backends: own backends by name; None = those made for the device's type, without the reference.
        peers: whether to run the peers that are installed (absent ones are reported).
        skip: contenders to leave out.
        device: "auto", "cpu", "cuda", "cuda:1".
        dtype: fp32, bf16, fp16 for queries and caches (fp8 caches stay fp8); "" = the case's own.
        heads_first: lay the caches out as ``[num_blocks, num_kv_heads, block_size, head_dim]`` instead of
            tokens first.
        repeats: samples per contender at least, each a round over all layers' caches.
        bandwidth: memory ceiling in TB/s; None = measured.
        flop_rate: compute ceiling in TFLOP/s; None = measured.
        output: write the document here, after every case.
        plot: write a PNG here.
        json_only: print nothing but the JSON line.
    """

    suites: Sequence[str] = ("decode",)
    case: str = ""
    backends: Sequence[str] | None = None
    peers: bool = True
    skip: Sequence[str] = ()
    device: str = "auto"
    dtype: str = ""
    heads_first: bool = False
    repeats: int = 24
    bandwidth: float | None = None
    flop_rate: float | None = None
    output: str = ""
    plot: str = ""
    json_only: bool = False


@torch.inference_mode()
def run(options: Options, extra: Sequence[Contender] = ()) -> dict[str, Any]:
    """Run the benchmark and return its document: ``conditions``, ``ceilings``, ``rows``, ``summary``.

    Args:
        options: what to run.
        extra: further contenders, after the built-in ones.

    Raises:
        ArgumentError, BackendUnavailableError: an option names something unknown; nothing has run then.
    """
    dtype = short_dtype(options.dtype)
    if dtype and dtype not in DTYPES:
        raise ArgumentError("dtype", f"one of {', '.join(DTYPES)}", repr(options.dtype))
    if options.repeats < 1:
        raise ArgumentError("repeats", "at least 1", str(options.repeats))
    if options.plot:
        from torchpaged.bench.attention.plot import require_matplotlib

        require_matplotlib()
    device = device_named(options.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams, graphs and events below are the current device's
    cases = select_cases(options.suites, options.case, DTYPES.get(dtype))
    known = contenders(device, options.backends, options.peers, options.skip)
    everybody = [*known, *extra, *in_parts_of(known, cases)]
    document: dict[str, Any] = {
        "benchmark": "attention",
        "conditions": conditions.collect(device),
        "ceilings": _ceilings(options, device),
    }
    document["rows"] = []
    free_memory(device)
    with Screen(len(cases) * len(everybody), enabled=not options.json_only) as screen:
        for case in cases:
            document["rows"].append(
                measure_case(
                    case,
                    everybody,
                    device,
                    document["ceilings"],
                    options.repeats,
                    options.heads_first,
                    screen.step,
                )
            )
            screen.row(document["rows"][-1])
            document["summary"] = summarise(document["rows"])
            if options.output:  # after every case: an interrupted run keeps what it has
                Path(options.output).write_text(json.dumps(document, indent=1) + "\n")
    if device.type == "cuda":
        document["conditions"]["gpu_state_after"] = conditions.gpu_state(device)
    screen.finish(document)
    if options.output:
        Path(options.output).write_text(json.dumps(document, indent=1) + "\n")
    if options.plot:
        from torchpaged.bench.attention.plot import plot

        plot(document, options.plot)
    return document


def _ceilings(options: Options, device: torch.device) -> dict[str, Any]:
    given = "given"
    bandwidth, how = (
        (options.bandwidth * 1e12, given) if options.bandwidth else timing.measure_bandwidth(device)
    )
    flop_rate, how_flops = (
        (options.flop_rate * 1e12, given) if options.flop_rate else timing.measure_flop_rate(device)
    )
    return {
        "bytes_per_s": bandwidth,
        "bytes_per_s_from": how,
        "flop_per_s": flop_rate,
        "flop_per_s_from": how_flops,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line without typer; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Paged attention against its peers; the last line of stdout is JSON."
    )
    parser.add_argument(
        "--suite",
        action="append",
        help=f"all, {', '.join(SUITES)}; may be given several times; default: decode",
    )
    parser.add_argument("--case", default="", help="keep cases whose name contains this")
    parser.add_argument("--backends", help="own backends, separated by commas; default: those for the device")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="run the peers")
    parser.add_argument("--skip", default="", help="contenders to leave out, separated by commas")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    parser.add_argument("--dtype", default="", help="fp32, bf16, fp16 instead of the cases' own")
    parser.add_argument(
        "--heads-first",
        action="store_true",
        help="caches as [num_blocks, num_kv_heads, block_size, head_dim] in memory",
    )
    parser.add_argument("--repeats", type=int, default=24, help="samples per contender at least")
    parser.add_argument("--bandwidth", type=float, help="memory ceiling in TB/s; default: measured")
    parser.add_argument("--flop-rate", type=float, help="compute ceiling in TFLOP/s; default: measured")
    parser.add_argument("--output", default="", help="write the document to this JSON file")
    parser.add_argument("--plot", default="", help="write a plot to this PNG file (needs matplotlib)")
    parser.add_argument("--json-only", action="store_true", help="print nothing but the JSON line")
    given = parser.parse_args(arguments)
    try:
        document = run(
            Options(
                given.suite or ("decode",),
                given.case,
                split(given.backends) or None,
                given.peers,
                split(given.skip),
                given.device,
                given.dtype,
                given.heads_first,
                given.repeats,
                given.bandwidth,
                given.flop_rate,
                given.output,
                given.plot,
                given.json_only,
            )
        )
    except TorchpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(document), flush=True)
    return exit_code(document)


def split(names: str | None) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name.strip() for name in (names or "").split(",") if name.strip())


if __name__ == "__main__":
    raise SystemExit(main())
