"""Paged attention next to FlashInfer, FlashAttention-3 and plain PyTorch (needs torch only).

    PYTHONPATH=. python benchmarks/bench_attention.py --suite decode --bandwidth 4.35 --output results.json \\
        --plot results.png

What it measures and how: benchmarks/README.md.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from attention_peers.contenders import contenders
from attention_peers.in_parts import in_parts_of
from attention_peers.options import Options
from attention_peers.plot import plot, require_matplotlib
from attention_peers.run import cases_of, exit_code, run
from attention_peers.suites import SUITES
from documents import parser_of
from measuring import split

from torchpaged.custom_ops.errors import TorchpagedError
from torchpaged.names import device_named

HEADS_FIRST = "caches as [num_blocks, num_kv_heads, block_size, head_dim] in memory"


def run_with_peers(
    options: Options, *, peers: bool = True, skip: Sequence[str] = (), plot_file: str = ""
) -> dict[str, Any]:
    """`attention_peers.run.run` with peers, absent ones reported, and own backends in parts.

    Args:
        options: what to run.
        peers: whether to run the peers that are installed.
        skip: contenders to leave out.
        plot_file: write a PNG here.
    """
    if plot_file:
        require_matplotlib()
    known = contenders(device_named(options.device), split(options.backends) or None, peers, skip)
    cases = cases_of(options)
    document = run(options, cases, [*known, *in_parts_of(known, cases)])
    if plot_file:
        plot(document, plot_file)
    return document


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line without typer; returns the exit code."""
    description = "Paged attention against its peers; the last line of stdout is JSON."
    parser = parser_of(Options, description, heads_first=HEADS_FIRST)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="run the peers")
    parser.add_argument("--skip", default="", help="contenders to leave out, separated by commas")
    parser.add_argument("--plot", default="", help="write a plot to this PNG file (needs matplotlib)")
    parser.epilog = f"suites: all, {', '.join(SUITES)}"
    given = vars(parser.parse_args(arguments))
    peers, skip, plot_file = given.pop("peers"), split(given.pop("skip")), given.pop("plot")
    try:
        document = run_with_peers(Options(**given), peers=peers, skip=skip, plot_file=plot_file)
    except TorchpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(document), flush=True)
    return exit_code(document)


if __name__ == "__main__":
    raise SystemExit(main())
