"""The CUDA C++ prefill kernel on a Hopper GPU: checked against float64, and timed against its peers.

    PYTHONPATH=. python benchmarks/bench_prefill_kernel.py [--parts check,time,power]
        [--seconds 150] [--json PATH]

Every part runs in a process of its own under a watchdog: a case that says nothing for 40 seconds is reported
as hung, its process is ended and the part goes on with the next case. ``check``: outputs and LSE against
attention in float64, with NaN in all memory that no token was written to, the same bits twice, and one
captured graph replayed at other lengths. ``time``: TFLOP/s over visible keys (4 * head_dim * num_heads * sum
of visible keys), contenders in turns, medians of CUDA-graph replays: this kernel, the Triton kernel, torch's
SDPA on contiguous tensors, and FlashAttention-3 (``flash_attn_interface``) with the same blocks and with one
block per request. ``power``: clock and power while one contender runs on and on. One JSON line per result;
``--json`` writes them as one document.
"""

import argparse
import json
import time
from pathlib import Path

from prefill_kernel.parts import PARTS
from prefill_kernel.processes import Report, compile_ahead, supervise, work

SHARES = {"check": 0.5, "time": 0.65}  # most of the remaining time that a part may take


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="check,time,power")
    parser.add_argument("--seconds", type=float, default=150.0, help="nothing runs on after this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, json.loads(args.cases))
        return
    stop, report, parts = time.monotonic() + args.seconds, Report(args.json), args.parts.split(",")
    refused = compile_ahead(parts)
    for part in parts:
        for (of, name), error in refused.items():
            if of == part:
                report.add({"part": part, "case": name, "ok": False, "does not compile": error})
        # cases that hang leave time for the other parts
        end = time.monotonic() + (stop - time.monotonic()) * SHARES.get(part, 1.0)
        supervise(part, [name for name in PARTS[part] if (part, name) not in refused], end, report)
    bad = [f"{r['part']}: {r['case']}" for r in report.results if not r["ok"]]
    print(
        f"{len(report.results) - len(bad)} of {len(report.results)} cases fine"
        + (f"; not: {', '.join(bad)}" if bad else "")
    )


if __name__ == "__main__":
    main()
