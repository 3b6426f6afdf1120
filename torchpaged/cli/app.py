"""The command line: ``torchpaged generate | bench | tune | backends | env``.

typer and rich belong to the ``demo`` and ``bench`` extras; only the command modules and the bench's screen
import them.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import torch

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ImportError as _error:  # pragma: no cover - depends on the installation
    raise SystemExit(
        f"torchpaged's command line needs {_error.name}; pip install 'torchpaged[demo]'"
    ) from None

from torchpaged.backends import GraphSupport, attention_spec, get_backend, list_backends, select_backend
from torchpaged.backends.choose.names import requested
from torchpaged.backends.choose.order import platform_table
from torchpaged.backends.choose.select import ranking
from torchpaged.backends.table import capability_tables, declared
from torchpaged.cli.bench import app as bench_app
from torchpaged.cli.tune import tune
from torchpaged.custom_ops import variables
from torchpaged.custom_ops.errors import TorchpagedError
from torchpaged.names import LONG_NAMES, device_named, short_dtype

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Paged-KV attention: text out of a model, what runs here and why, and benchmarks.",
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.command()(tune)
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def _dtype(name: str, option: str, of_caches: bool = False) -> torch.dtype:
    """The dtype of that name; fp8 is for caches, and to be told who can not."""
    short = short_dtype(name)
    known = [short for short in DTYPES if of_caches or not short.startswith("fp8")]
    if short not in known:
        raise typer.BadParameter(
            f"expected one of {', '.join([*known, *LONG_NAMES])}, got {name!r}", param_hint=option
        )
    return DTYPES[short]


def _sizes(text: str, option: str) -> list[int] | None:
    """``"1,2,4"`` as numbers; None for an empty text."""
    if not text:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise typer.BadParameter(
            f"expected numbers of at least 1 such as 1,2,4, got {text!r}", param_hint=option
        )
    return [int(word) for word in words]


@app.command()
def generate(
    prompts: Annotated[
        list[str], typer.Argument(help="one or more prompts; they run in one continuous batch")
    ],
    model: Annotated[
        str, typer.Option(help="HuggingFace folder or hub id; default: SmolLM2-135M-Instruct, fetched once")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(help="new tokens per prompt at most")] = 64,
    temperature: Annotated[float, typer.Option(help="0 = greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 = all")] = 0,
    top_p: Annotated[float, typer.Option(help="1 = all")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="least share of the likeliest token's probability; 0 = all")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="on tokens that occurred; 1 = off")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="seed of the draws; default: a fresh one")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="end at this text; may be given several times")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="go on past the model's end token")] = False,
    chat: Annotated[bool, typer.Option(help="wrap each prompt in the model's chat template")] = False,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="torch.compile the decode step; default: on a GPU unless fully fused",
        ),
    ] = None,
    fuse: Annotated[
        bool, typer.Option("--fuse/--no-fuse", help="fewer, larger kernels per layer: torchpaged.hf.fuse")
    ] = False,
    steps_per_launch: Annotated[int, typer.Option(help="decode steps per graph launch")] = 1,
    buckets: Annotated[
        str,
        typer.Option(
            help=(
                "batch sizes to capture, such as 1,2,4; the largest is how many prompts run at once; "
                "default: for all prompts"
            )
        ),
    ] = "",
    prefill_buckets: Annotated[
        str,
        typer.Option(
            help=(
                "numbers of prompt tokens to capture prefills for, such as 64,512; none: launched from "
                "Python; default: automatic"
            )
        ),
    ] = "",
    backend: Annotated[str, typer.Option(help=f"auto, {', '.join(list_backends())}")] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            help="auto, fp32, bf16, fp16 (or float32, bfloat16, float16); auto: bf16 on a GPU, fp32 on a CPU"
        ),
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    max_seq_len: Annotated[
        int, typer.Option(help="tokens per request, prompt included; 0: the model's, at most 2048")
    ] = 0,
    block_size: Annotated[int, typer.Option(help="tokens per block of the cache")] = 16,
    num_blocks: Annotated[int, typer.Option(help="blocks of the cache; 0: enough for all prompts")] = 0,
    offline: Annotated[bool, typer.Option(help="download nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="print decisions with reasons, the fusion report and the table of buckets"
        ),
    ] = False,
    profile: Annotated[
        str,
        typer.Option(
            help="write a torch.profiler trace of the generation to this file, and list kernels by module"
        ),
    ] = "",
    compile_cache: Annotated[
        str,
        typer.Option(
            help=(
                "keep compiled code in this file: read if it is there, written if not; read only files you "
                "trust"
            )
        ),
    ] = "",
) -> None:
    """Generate text, streamed as it comes, with a summary line at the end."""
    from torchpaged.cli.generate import Settings, run

    if not any(prompts):
        raise typer.BadParameter("expected text, got an empty prompt", param_hint="PROMPTS")
    place = device_named(device)
    kind = ("bf16" if place.type == "cuda" else "fp32") if dtype == "auto" else dtype
    if offline:
        os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    settings = Settings(
        model,
        prompts,
        place,
        _dtype(kind, "--dtype"),
        backend,
        compile,
        chat,
        max_seq_len,
        block_size,
        num_blocks,
        as_json,
        {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "seed": seed,
            "stop": tuple(stop or ()),
            "ignore_eos": ignore_eos,
        },
        profile,
        compile_cache,
        fuse,
        steps_per_launch,
        _sizes(buckets, "--buckets"),
        [] if prefill_buckets == "none" else _sizes(prefill_buckets, "--prefill-buckets") or "auto",
        verbose,
        offline,
    )
    raise typer.Exit(run(settings))


#: Options of `backends` for what an attention uses: the option, what `attention_spec` is given for it, help.
_FEATURES: tuple[tuple[str, str, Any, str], ...] = (
    ("window", "window_size", (128, -1), "sliding window"),
    ("soft_cap", "logits_soft_cap", 1.0, "logits soft cap"),
    ("alibi", "alibi_slopes", True, "ALiBi"),
    ("sinks", "sinks", True, "attention sinks"),
    ("chunked", "chunk_size", 128, "attention within chunks of positions"),
    ("bidirectional", "causal", False, "attention without causality"),
    ("lse", "lse", True, "the log-sum-exp is returned, too"),
    ("tree", "tree_mask", True, "query tokens that see some of their request's, not all"),
    ("latent", "latent", True, "mla_attention: latents of head_dim numbers, the first head_dim_v the values"),
    ("batch_invariant", "batch_invariant", True, "a request's bits don't depend on the others in the batch"),
    ("fp8_queries", "fp8_queries", True, "queries of e4m3; --dtype is the output's alone"),
)


def _with_features(command: Callable[..., None]) -> Callable[..., None]:
    """``command(..., **features)`` with an option for each of `_FEATURES`, off unless it is given."""
    signature = inspect.signature(command, eval_str=True)
    kept = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, kind, default=False, annotation=Annotated[bool, typer.Option(help=words)])
        for name, _, _, words in _FEATURES
    ]
    command.__signature__ = signature.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    return command


@app.command()
@_with_features
def backends(
    head_dim: Annotated[int, typer.Option(help="width of queries and keys", min=1)] = 128,
    head_dim_v: Annotated[int, typer.Option(help="width of values; 0: head_dim", min=0)] = 0,
    num_heads: Annotated[int, typer.Option(help="query heads", min=1)] = 32,
    num_kv_heads: Annotated[int, typer.Option(help="kv heads", min=1)] = 8,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32")] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help="of the cache; default: dtype")] = "",
    block_size: Annotated[int, typer.Option(help="tokens per block", min=1)] = 16,
    query_len: Annotated[int, typer.Option(help="query tokens of a request at most; 0: any", min=0)] = 0,
    deterministic: Annotated[bool, typer.Option(help="equal calls must give equal bits")] = False,
    graphs: Annotated[
        str, typer.Option(help="least graph support: never, single_token_decode, uniform_batch, always")
    ] = "never",
    plans: Annotated[bool, typer.Option(help="the caller plans each batch, as open_session asks")] = False,
    backend: Annotated[
        str, typer.Option(help="a name, or a route such as decode=cuda,prefill=flash_attn")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
    platforms: Annotated[
        bool, typer.Option("--platforms", help="print the order on each kind of device, in Markdown")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="print what they declare, in Markdown")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    **features: bool,
) -> None:
    """Which backends can run an attention here, and every reason why the others can't."""
    if num_heads % num_kv_heads:
        raise typer.BadParameter(
            f"expected a divisor of --num-heads ({num_heads}), got {num_kv_heads}",
            param_hint="--num-kv-heads",
        )
    if graphs.upper() not in GraphSupport.__members__:
        known = ", ".join(level.name.lower() for level in GraphSupport)
        raise typer.BadParameter(f"expected one of {known}, got {graphs!r}", param_hint="--graphs")
    spec = attention_spec(
        device=device_named(device),
        dtype=_dtype(dtype, "--dtype", of_caches=True),
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim_v=head_dim_v or None,
        kv_dtype=_dtype(kv_dtype, "--kv-dtype", of_caches=True) if kv_dtype else None,
        max_query_len=query_len or None,
        deterministic=deterministic,
        graphs=GraphSupport[graphs.upper()],
        **{name: value for option, name, value, _ in _FEATURES if features[option]},
    )
    if table or platforms:
        print(capability_tables() if table else platform_table(), end="")
        return
    reasons = {name: get_backend(name).reject(spec) for name in list_backends()}
    route = None
    try:
        choice = select_backend(spec, backend, plans=plans)
        chosen, why, route = choice.name, choice.reason, asdict(choice.route)
    except TorchpagedError as error:
        chosen, why = "", str(error)
    status = 0 if chosen or requested(backend)[0] == "auto" else 2
    if as_json:
        order = ranking(spec.device)
        report = {
            "chosen": chosen,
            "route": route,
            "reason": why,
            "order": {"decode": order.decode, "prefill": order.prefill, "evidence": order.evidence},
            "rejected": {name: r for name, r in reasons.items() if r},
            "declared": {name: declared(name) for name in reasons},
        }
        print(json.dumps(report))
        raise typer.Exit(status)
    shown = Table("backend", "usable", "graphs", "why not")
    for name, rejected in reasons.items():
        support = get_backend(name).capabilities.graph_support.name
        shown.add_row(name, "no" if rejected else "yes", support, escape("\n".join(rejected)))
    console = Console()
    console.print(shown)
    console.print(f"chosen: {chosen or 'none'} ({why})", markup=False)
    raise typer.Exit(status)


@app.command(name="env")
def environment(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Versions, kernels, devices and variables, for bug reports."""
    from torchpaged.cli.report import collect

    report = collect()
    if as_json:
        print(json.dumps(report))
        return
    console = Console()
    for section, content in report.items():
        if not isinstance(content, dict):
            console.print(f"[bold]{section}[/bold]: {content}")
            continue
        table = Table(title=section, title_justify="left", show_header=False)
        for key, value in content.items():
            shown = (
                f"{value['value'] or value['default']}  ({value['meaning']})"
                if isinstance(value, dict) and "meaning" in value
                else value
            )
            table.add_row(key, escape(str(shown)))
        console.print(table)


def main() -> Any:
    """Entry point: errors are one line and exit code 2; TORCHPAGED_DEBUG=1 shows tracebacks."""
    debug = False
    try:
        debug = variables.get("TORCHPAGED_DEBUG")
        for variable in variables.VARIABLES:
            if variable.name in os.environ:
                variables.get(variable.name)
        return app()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except (TorchpagedError, OSError, ValueError) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
