"""The state ops on a GPU at models' sizes: decode over batches, and prompts.

    PYTHONPATH=. python benchmarks/bench_state.py [--batches 1,32,128,1024] [--output FILE]

Every case runs against the reference before it is timed. ``us`` is of one call, from graphs over several
pools that are larger together than the L2 cache; ``gb_per_s`` counts each state read and written once. The
last line is one JSON document.
"""

import json
import sys
from typing import Any

import torch
from documents import command_line, write_rows
from measuring.timing import CudaSampler, interleave

from torchpaged.custom_ops import BACKEND_OPS

ROUND_BYTES, CALLS = 256 << 20, 8
#: key heads, heads, key_dim, value_dim, delta rule; a shard of two of Qwen3-Next's, and Mamba 2 of 80 heads
SHAPES = {"gdn-tp2": (8, 16, 128, 128, True), "mamba2": (1, 80, 128, 64, False)}
PROMPTS = {"1 x 4096": (1, 4096), "8 x 2048": (8, 2048), "32 x 256": (32, 256)}


def linear(shape: str, rows: int, tokens: int, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """A call of ``rows`` requests of ``tokens`` new tokens each that have a past."""
    key_heads, heads, key_dim, value_dim, delta = SHAPES[shape]
    make: dict[str, Any] = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(seed)}
    bf16, total = {"dtype": torch.bfloat16, **make}, rows * tokens
    begins = tokens > 1
    return {
        "q": torch.randn(total, key_heads, key_dim, **bf16),
        "k": torch.randn(total, key_heads, key_dim, **bf16),
        "v": torch.randn(total, heads, value_dim, **bf16),
        "g": -torch.rand(total, heads, **make) * 0.5,
        "state": torch.randn(rows + 1, heads, key_dim, value_dim, **make).to(dtype),
        "state_slots": (torch.randperm(rows, **make) + 1).int(),
        "seq_lens": torch.full((rows,), tokens if begins else 100, dtype=torch.int32, device="cuda"),
        "query_start_loc": torch.arange(rows + 1, dtype=torch.int32, device="cuda") * tokens,
        "out": torch.empty(total, heads, value_dim, dtype=torch.bfloat16, device="cuda"),
        "beta": torch.rand(total, heads, **bf16),
        "max_query_len": tokens,
        "scale": key_dim**-0.5,
        "delta_rule": delta,
        "normalize": delta,
    }


def conv(rows: int, tokens: int, seed: int, channels: int = 4096) -> dict[str, Any]:
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    make = {**made, "generator": torch.Generator("cuda").manual_seed(seed)}
    return {
        "x": torch.randn(rows * tokens, channels, **make),
        "weight": torch.randn(channels, 4, **make) / 2,
        "conv_state": torch.randn(rows + 1, 3, channels, **make),
        "state_slots": torch.arange(rows, dtype=torch.int32, device="cuda") + 1,
        "seq_lens": torch.full((rows,), tokens if tokens > 1 else 100, dtype=torch.int32, device="cuda"),
        "query_start_loc": torch.arange(rows + 1, dtype=torch.int32, device="cuda") * tokens,
        "out": torch.empty(rows * tokens, channels, **made),
        "max_query_len": tokens,
        "activation": "silu",
    }


def measure(op: str, sets: list[dict[str, Any]], state_bytes: int, **names: Any) -> dict[str, Any]:
    """One case: right first, then timed."""
    small = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in sets[0].items()}
    getattr(BACKEND_OPS["triton"], op)(**small)
    error = None
    if small["max_query_len"] <= 256:  # the reference goes token by token
        want = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in sets[0].items()}
        getattr(BACKEND_OPS["reference"], op)(**want)
        error = float((small["out"].float() - want["out"].float()).norm() / want["out"].float().norm())
        if not error < 2e-2:
            raise AssertionError(f"{names}: off by {error}")
    run = getattr(BACKEND_OPS["triton"], op)
    calls = [lambda i=i: run(**sets[i % len(sets)]) for i in range(max(CALLS, len(sets)))]
    timing = interleave({op: CudaSampler(calls)}, 12)[op]
    row = {"op": op, **names, "us": round(timing.median_us, 2), "error": error}
    row["gb_per_s"] = round(2 * state_bytes / timing.median_us / 1e3)
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def main() -> None:
    args = command_line(__doc__, batches=[1, 32, 128, 1024], output=str)
    rows = []
    for shape, (_, heads, key_dim, value_dim, _) in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            item = heads * key_dim * value_dim * dtype.itemsize
            for batch in args.batches:
                count = max(1, min(8, -(-ROUND_BYTES // (item * batch))))
                sets = [linear(shape, batch, 1, dtype, seed) for seed in range(count)]
                names = {"shape": shape, "state": str(dtype)[6:], "batch": batch}
                rows.append(measure("linear_attention", sets, item * batch, **names))
        for name, (batch, tokens) in PROMPTS.items():
            sets = [linear(shape, batch, tokens, torch.float32, 0)]
            rows.append(measure("linear_attention", sets, 0, shape=shape, prompts=name))
    for batch in args.batches:
        rows.append(
            measure("causal_conv", [conv(batch, 1, s) for s in range(4)], batch * 3 * 4096 * 2, batch=batch)
        )
    rows.append(measure("causal_conv", [conv(8, 2048, 0)], 0, prompts="8 x 2048"))
    write_rows(rows, args.output)


if __name__ == "__main__":
    main()
