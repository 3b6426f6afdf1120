"""delta_step in one launch and by its parts, at the sizes of Qwen3.5-0.8B, Qwen3-Next and Kimi Linear, and
mamba2_step likewise, at those of Granite 4.0 H 1B and Falcon-H1-1.5B.

    PYTHONPATH=. python benchmarks/bench_delta_step.py [--shapes NAMES] [--batches 1 8 64 128] [--output FILE]

Both are compared with the reference first, then timed in turns, in graphs over several pools that are larger
together than the L2 cache. ``us`` is of one call; ``gb_per_s`` counts each state read and written once. The
last line is one JSON document.
"""

import json
import sys
from functools import partial
from typing import Any

import torch
from documents import command_line, write_rows
from measuring.timing import CudaSampler, interleave
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.state.call import DeltaStepCall, Mamba2StepCall
from torchpaged.custom_ops.state.cuda.linear_attention import linear_attention
from torchpaged.custom_ops.state.triton import delta_step, mamba2_step

#: key heads, heads, numbers of a head's decay; all have heads of 128 x 128
SHAPES = {"qwen3.5-0.8b": (16, 16, 1), "qwen3-next": (16, 32, 1), "kimi-linear": (32, 32, 128)}
#: heads and rows of a head's state, which has 64 columns; one group
MAMBA2 = {"granite4-h-1b": (48, 128), "falcon-h1-1.5b": (48, 256)}
ROUND_BYTES, CALLS = 256 << 20, 8


def inputs(shape: str, rows: int, seed: int) -> dict[str, Any]:
    """A call of ``rows`` requests that have a past."""
    (key_heads, heads, decays), made = SHAPES[shape], {"device": "cuda", "dtype": torch.bfloat16}
    make: dict[str, Any] = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(seed)}
    bf16 = {**make, "dtype": torch.bfloat16}
    channels = (2 * key_heads + heads) * 128
    sizes = [channels, heads * 128, heads, heads * decays]
    x, gate, b, a = torch.randn(rows, sum(sizes), **bf16).split(sizes, dim=1)
    return {
        "x": x,
        "weight": torch.randn(channels, 4, **bf16) / 2,
        "conv_state": torch.randn(rows + 1, 3, channels, **bf16),
        "a": a[:, None],
        "b": b[:, None],
        "a_log": torch.rand(heads, **bf16),
        "dt_bias": torch.randn(heads * decays, **bf16),
        "state": torch.randn(rows + 1, heads, 128, 128, **make),
        "gate": gate[:, None],
        "norm_weight": torch.rand(128, **bf16),
        "state_slots": (torch.randperm(rows, **make) + 1).int(),
        "seq_lens": torch.full((rows,), 100, dtype=torch.int32, device="cuda"),
        "query_start_loc": torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
        "out": torch.empty(rows, heads, 128, **made),
        "scale": 128**-0.5,
    }


def mamba2_inputs(shape: str, rows: int, seed: int) -> dict[str, Any]:
    """Likewise, of Mamba 2."""
    heads, key_dim = MAMBA2[shape]
    make: dict[str, Any] = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(seed)}
    bf16 = {**make, "dtype": torch.bfloat16}
    values, channels = heads * 64, heads * 64 + 2 * key_dim
    gate, x, dt = torch.randn(rows, values + channels + heads, **bf16).split([values, channels, heads], dim=1)
    return {
        "x": x,
        "weight": torch.randn(channels, 4, **bf16) / 2,
        "conv_state": torch.randn(rows + 1, 3, channels, **bf16),
        "dt": dt,
        "a_log": torch.rand(heads, **bf16),
        "dt_bias": torch.randn(heads, **bf16),
        "state": torch.randn(rows + 1, heads, key_dim, 64, **make),
        "skip_weight": torch.rand(heads, **bf16),
        "state_slots": (torch.randperm(rows, **make) + 1).int(),
        "seq_lens": torch.full((rows,), 100, dtype=torch.int32, device="cuda"),
        "query_start_loc": torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
        "out": torch.empty(rows, heads, 64, dtype=torch.bfloat16, device="cuda"),
        "gate": gate.unflatten(1, (heads, 64)),
        "semaphore": torch.zeros(rows, dtype=torch.int32, device="cuda"),
    }


def delta_by_parts(**given: Any) -> None:
    """The launches that a step was before."""
    delta_step.run_parts(DeltaStepCall(**given), linear_attention)


def mamba2_by_parts(**given: Any) -> None:
    """Likewise, but for the norm."""
    mamba2_step.run_parts(Mamba2StepCall(**given), linear_attention)


def measure(shape: str, rows: int) -> dict[str, Any]:
    """One case: right first, then timed."""
    op, make, by_parts = (
        ("mamba2_step", mamba2_inputs, mamba2_by_parts)
        if shape in MAMBA2
        else ("delta_step", inputs, delta_by_parts)
    )
    state_bytes = make(shape, 1, 0)["state"][:1].nbytes * rows
    sets = [make(shape, rows, seed) for seed in range(max(1, min(8, -(-ROUND_BYTES // state_bytes))))]
    ways = {"one launch": getattr(BACKEND_OPS["cuda"], op), "parts": by_parts}
    want = {name: x.clone() if isinstance(x, Tensor) else x for name, x in sets[0].items()}
    getattr(BACKEND_OPS["reference"], op)(**want)
    row: dict[str, Any] = {"shape": shape, "batch": rows}
    for name, run in ways.items():
        got = {name: x.clone() if isinstance(x, Tensor) else x for name, x in sets[0].items()}
        run(**got)
        for tensor in ("out", "state", "conv_state"):
            error = float((got[tensor].float() - want[tensor].float()).norm() / want[tensor].float().norm())
            if not error < 2e-2:
                raise AssertionError(f"{shape}, {rows} rows, {name}: {tensor} is off by {error}")
    samplers = {
        name: CudaSampler([partial(run, **sets[i % len(sets)]) for i in range(max(CALLS, len(sets)))])
        for name, run in ways.items()
    }
    for name, timing in interleave(samplers, 12).items():
        row[name] = {
            "us": round(timing.median_us, 2),
            "gb_per_s": round(2 * state_bytes / timing.median_us / 1e3),
        }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def main() -> None:
    args = command_line(__doc__, shapes=[*SHAPES, *MAMBA2], batches=[1, 8, 64, 128], output=str)
    write_rows([measure(shape, rows) for shape in args.shapes for rows in args.batches], args.output)


if __name__ == "__main__":
    main()
