"""Decode attention on a CPU: the native kernel against gather-then-SDPA, and the dispatch cost of every op.

    python benchmarks/bench_cpu_decode.py [--threads 1] [--context 4096] [--json]

A correctness gate runs before each timing. Figures are medians with p20 and p80; the last line is one
JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
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
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    result: dict[str, Any] = {
        "machine": cpu,
        "torch": torch.__version__,
        "threads": args.threads,
        "context": args.context,
    }
    result["decode"], result["dispatch"] = [], {}
    say = (lambda *_: None) if args.json else print
    say(f"{cpu}, torch {torch.__version__}, {args.threads} thread(s), context {args.context}, block 16")
    say(f"{'heads/kv/dim':>14} {'reqs':>4} {'dtype':>9} {'native us':>10} {'sdpa us':>10} {'ratio':>6}")
    for heads, kv_heads, dim, reqs, dtype in CASES:
        spec = BatchSpec("bench", (args.context,) * reqs, (1,) * reqs)
        batch = make_batch(
            spec, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype, extra_columns=0
        )
        out, lse = run_paged_attention(BACKEND_OPS["cpu"], batch)
        assert_attention_close(out, lse, batch)
        torch.testing.assert_close(gather_then_sdpa(batch).float(), out.float(), rtol=2e-2, atol=2e-2)
        native = measure(lambda batch=batch: run_paged_attention(BACKEND_OPS["cpu"], batch), args.seconds)
        sdpa = measure(lambda batch=batch: gather_then_sdpa(batch), args.seconds)
        ratio = sdpa["median_us"] / native["median_us"]
        row = {
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": dim,
            "reqs": reqs,
            "dtype": str(dtype),
            "ratio": ratio,
        }
        result["decode"].append({**row, "native": native, "gather_sdpa": sdpa})
        say(
            f"{f'{heads}/{kv_heads}/{dim}':>14} {reqs:>4} {str(dtype)[6:]:>9} {native['median_us']:>10.0f} "
            f"{sdpa['median_us']:>10.0f} {ratio:>6.2f}"
        )
    say("dispatch of one op call with tiny inputs, native kernels:")
    for case, (op, inputs, options) in opcheck_cases().items():
        if case in ("attention_full", "attention_lse") or op not in NATIVE_OPS:
            continue
        if case == "attention":  # one request of one token: what is left is dispatch
            tiny = make_batch(BatchSpec("tiny", (1,), (1,)), num_heads=1, num_kv_heads=1, head_dim=8)
            inputs = (
                tiny.q,
                tiny.k_cache,
                tiny.v_cache,
                tiny.block_table,
                tiny.seq_lens,
                tiny.query_start_loc,
                torch.zeros_like(tiny.q),
            )
            options = {"max_query_len": 1, "scale": 1.0}
        handle = getattr(BACKEND_OPS["cpu"], op)

        def hundred(handle: Any = handle, inputs: Any = inputs, options: Any = options) -> None:
            for _ in range(100):
                handle(*inputs, **options)

        with torch.inference_mode():
            figures = {k: v / 100 for k, v in measure(hundred, args.seconds).items()}
        result["dispatch"][op] = figures
        say(f"{op:>20} {figures['median_us']:>8.1f} us")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
