"""Paged attention beside FlashInfer, FlashAttention-3 and plain PyTorch (needs torch only).

    PYTHONPATH=. python benchmarks/bench_attention.py --suite decode --bandwidth 4.35 --output results.json \\
        --plot results.png

What it measures and how: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from attention_peers.contenders import contenders
from attention_peers.in_parts import in_parts_of
from attention_peers.plot import plot, require_matplotlib

from torchpaged.bench.attention import Options, exit_code, run, split
from torchpaged.bench.attention.cases import SUITES
from torchpaged.bench.attention.run import cases_of
from torchpaged.custom_ops.errors import TorchpagedError
from torchpaged.names import device_named


def run_beside_peers(
    options: Options, *, peers: bool = True, skip: Sequence[str] = (), plot_file: str = ""
) -> dict[str, Any]:
    """`torchpaged.bench.attention.run` with peers, absent ones reported, and own backends in parts.

    Args:
        options: what to run.
        peers: whether to run the peers that are installed.
        skip: contenders to leave out.
        plot_file: write a PNG here.
    """
    if plot_file:
        require_matplotlib()
    known = contenders(device_named(options.device), options.backends, peers, skip)
    document = run(options, [*known, *in_parts_of(known, cases_of(options))])
    if plot_file:
        plot(document, plot_file)
    return document


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
    options = Options(
        given.suite or ("decode",),
        given.case,
        split(given.backends) or None,
        given.device,
        given.dtype,
        given.heads_first,
        given.repeats,
        given.bandwidth,
        given.flop_rate,
        given.output,
        given.json_only,
    )
    try:
        document = run_beside_peers(options, peers=given.peers, skip=split(given.skip), plot_file=given.plot)
    except TorchpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(document), flush=True)
    return exit_code(document)


if __name__ == "__main__":
    raise SystemExit(main())
