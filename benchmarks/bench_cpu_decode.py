"""Decode attention on a CPU: the native kernel against gather-then-SDPA, and the dispatch cost of every op.

    python benchmarks/bench_cpu_decode.py [--threads 1] [--context 4096] [--json]

A correctness gate runs before each timing. Figures are medians with p20 and p80; the last line is one
JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from op_inputs.opcheck import opcheck_cases

from torchpaged.bench import conditions
from torchpaged.custom_ops import BACKEND_OPS, native_status
from torchpaged.custom_ops.registry import NATIVE_OPS
from torchpaged.testing import BatchSpec, assert_attention_close, make_batch, run_paged_attention

CASES = [
    (heads, kv_heads, dim, reqs, dtype)
    for heads, kv_heads, dim in ((32, 8, 128), (9, 3, 64))
    for reqs in (1, 4)
    for dtype in (torch.float32, torch.bfloat16)
]


def measure(function: Callable[[], Any], seconds: float = 1.0) -> dict[str, float]:
    """Microseconds per call: median, p20, p80."""
    function()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times) < 5:
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e6)
    cuts = statistics.quantiles(times, n=5)
    return {"median_us": statistics.median(times), "p20_us": cuts[0], "p80_us": cuts[3]}


def gather_then_sdpa(batch: Any) -> torch.Tensor:
    """What plain PyTorch does with a paged cache: gather each request's blocks, then SDPA."""
    outs = []
    for row, length in enumerate(batch.seq_lens.tolist()):
        blocks = batch.block_table[row, : -(-length // batch.k_cache.shape[1])].long()
        k = batch.k_cache[blocks].flatten(0, 1)[:length].transpose(0, 1)[None]
        v = batch.v_cache[blocks].flatten(0, 1)[:length].transpose(0, 1)[None]
        q = batch.q[row][None, :, None]
        outs.append(F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0, :, 0])
    return torch.stack(outs)


def decode_row(case: tuple[Any, ...], context: int, seconds: float) -> dict[str, Any]:
    """One case, checked and timed."""
    heads, kv_heads, dim, reqs, dtype = case
    spec = BatchSpec("bench", (context,) * reqs, (1,) * reqs)
    batch = make_batch(
        spec, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype, extra_columns=0
    )
    out, lse = run_paged_attention(BACKEND_OPS["cpu"], batch)
    assert_attention_close(out, lse, batch)
    torch.testing.assert_close(gather_then_sdpa(batch).float(), out.float(), rtol=2e-2, atol=2e-2)
    native = measure(lambda: run_paged_attention(BACKEND_OPS["cpu"], batch), seconds)
    sdpa = measure(lambda: gather_then_sdpa(batch), seconds)
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "reqs": reqs,
        "dtype": str(dtype),
        "ratio": sdpa["median_us"] / native["median_us"],
        "native": native,
        "gather_sdpa": sdpa,
    }


@torch.inference_mode()
def dispatch(seconds: float) -> dict[str, dict[str, float]]:
    """Of one call of each native op with tiny inputs: those of its first case."""
    found: dict[str, dict[str, float]] = {}
    for case, (op, inputs, options) in opcheck_cases().items():
        if op in found or op not in NATIVE_OPS:
            continue
        if case == "attention":  # one request of one token: what is left is dispatch
            tiny = make_batch(BatchSpec("tiny", (1,), (1,)), num_heads=1, num_kv_heads=1, head_dim=8)
            (*inputs, _), options = tiny.arguments(torch.zeros_like(tiny.q), None, scale=1.0)
        handle = getattr(BACKEND_OPS["cpu"], op)

        def hundred(handle: Any = handle, inputs: Any = inputs, options: Any = options) -> None:
            for _ in range(100):
                handle(*inputs, **options)

        found[op] = {name: value / 100 for name, value in measure(hundred, seconds).items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="print the JSON document only")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded, reason = native_status()
    if not loaded:
        raise SystemExit(f"the native kernels are needed: {reason}")
    cpu = conditions.collect(torch.device("cpu"))["cpu"]
    result: dict[str, Any] = {
        "machine": cpu,
        "torch": torch.__version__,
        "threads": args.threads,
        "context": args.context,
        "decode": [],
    }
    say = (lambda *_: None) if args.json else print
    say(f"{cpu}, torch {torch.__version__}, {args.threads} thread(s), context {args.context}, block 16")
    say(f"{'heads/kv/dim':>14} {'reqs':>4} {'dtype':>9} {'native us':>10} {'sdpa us':>10} {'ratio':>6}")
    for case in CASES:
        row = decode_row(case, args.context, args.seconds)
        result["decode"].append(row)
        sizes = "/".join(map(str, case[:3]))
        times = f"{row['native']['median_us']:>10.0f} {row['gather_sdpa']['median_us']:>10.0f}"
        say(f"{sizes:>14} {row['reqs']:>4} {row['dtype'][6:]:>9} {times} {row['ratio']:>6.2f}")
    say("dispatch of one op call with tiny inputs, native kernels:")
    result["dispatch"] = dispatch(args.seconds)
    for op, figures in result["dispatch"].items():
        say(f"{op:>20} {figures['median_us']:>8.1f} us")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
