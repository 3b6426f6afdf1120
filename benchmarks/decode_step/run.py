"""A whole decode step of a model: ours in its variants against HuggingFace's, as one function and as a
command line.

    # or: python benchmarks/bench_step.py --shapes llama-1b
    document = run(Options(shapes=("llama-1b",), batches=(1, 8)))

Per shape a random-weight model is made on the device; every own contender passes the gate
(`decode_step.gate`) before it is timed, at a context of random keys and values. Whatever fails
becomes a row that says why. Needs transformers.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from documents import keep, parser_of
from measuring import conditions
from measuring.timing import measure_bandwidth

from decode_step.cases import select_shapes
from decode_step.options import DTYPES, Options
from decode_step.own import Variant
from decode_step.peers import PEERS
from decode_step.screen import StepScreen
from decode_step.shape import Shape
from torchpaged.custom_ops.errors import ArgumentError, TorchpagedError


def run(options: Options) -> dict[str, Any]:
    """Run the benchmark; returns ``conditions``, ``options``, ``ceilings`` and ``rows``, a row per shape,
    contender and batch.

    Raises:
        ArgumentError: an option names something unknown; nothing has run then.
    """
    shapes = select_shapes(options.shapes)
    variants = [Variant.parse(name) for name in options.only if name not in options.skip]
    _check(options)
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    )
    bandwidth, source = (
        measure_bandwidth(device) if options.bandwidth is None else (options.bandwidth * 1e12, "given")
    )
    document: dict[str, Any] = {
        "benchmark": "step",
        "conditions": conditions.collect(device),
        "options": asdict(options),
        "ceilings": {"bytes_per_s": bandwidth, "bytes_per_s_from": source},
        "rows": [],
    }
    started, total = (
        time.perf_counter(),
        len(shapes) * len(options.batches) * (len(variants) + len(options.peers)),
    )
    with StepScreen(total, enabled=not options.json_only) as screen:
        for shape in shapes:
            for row in Shape(shape, options, variants, device, bandwidth, screen, started).rows():
                document["rows"].append(row)
                screen.row(row)
                keep(document, options.output)
    document["seconds"] = time.perf_counter() - started
    if device.type == "cuda":
        document["conditions"]["gpu_state_after"] = conditions.gpu_state(device)
    screen.finish(document)
    keep(document, options.output)
    return document


def _check(options: Options) -> None:
    for peer in options.peers:
        if peer not in PEERS:
            raise ArgumentError("peers", f"some of {', '.join(PEERS)}", repr(peer))
    if options.dtype not in DTYPES:
        raise ArgumentError("dtype", f"one of {', '.join(DTYPES)}", repr(options.dtype))
    if not options.batches or min(options.batches) < 1:
        raise ArgumentError("batches", "batch sizes of at least 1", str(list(options.batches)))
    for name, value, least in (
        ("context", options.context, 32),
        ("repeats", options.repeats, 1),
        ("new_tokens", options.new_tokens, 2),
    ):
        if value < least:
            raise ArgumentError(name, f"at least {least}", str(value))


def exit_code(document: dict[str, Any]) -> int:
    """1 if an own contender was wrong or failed, or nothing was timed; else 0."""
    rows = document["rows"]
    own_fault = any(row["own"] and row["status"] in ("wrong", "failed") for row in rows)
    return 1 if own_fault or not any(row["status"] == "timed" for row in rows) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code. The last line of stdout is the document."""
    description = "Time of a whole decode step; the last line of stdout is JSON, all else goes to stderr."
    parser = parser_of(Options, description)
    try:
        document = run(Options(**vars(parser.parse_args(arguments))))
    except TorchpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(document), flush=True)
    return exit_code(document)


if __name__ == "__main__":
    raise SystemExit(main())
