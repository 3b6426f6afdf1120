"""What fp8 pools cost the kernels that write them, and our own rounding to e5m2 in place of the compiler's.

    PYTHONPATH=. python benchmarks/bench_write_fp8.py [--heads 32 --kv-heads 8 --head-dim 128] [--tokens 1,64]

Needs a GPU. Contenders, for `write_kv` and for `rope_write_kv`: pools in bf16, e4m3 and e5m2; for `write_kv`
also ``e5m2_converted``, the same kernel with Triton's conversion (Hopper has an instruction for it) where
ours rounds from the bits. A gate compares each with the reference before it is timed; of it the
numbers that differ are counted, not refused. Each round is one CUDA graph over several sets of tokens and
pools, the contenders in turns; figures are microseconds per call. The last line is one JSON document.
"""

import argparse
import json
import sys
import types
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from bench_write_kv import begin, figures_of, sets_of, shape_of
from documents import command_line

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from measuring.timing import CudaSampler, Sampler, interleave
from op_inputs.rope import make_rope_inputs

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.cache_write.triton import write_kv as kernels
from torchpaged.custom_ops.triton.cache_writes import saturate

DTYPES = {
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e5m2_converted": torch.float8_e5m2,
}


@triton.jit
def converted(x, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """`to_fp8` as the compiler converts."""
    return saturate(x, LIMIT).to(dtype)


def variant(kernel: Any) -> Any:
    """The kernel with `converted` where it calls `to_fp8`."""
    code = kernel.fn
    copy = types.FunctionType(code.__code__, {**code.__globals__, "to_fp8": converted}, code.__name__)
    copy.__module__, copy.__annotations__ = code.__module__, code.__annotations__
    copy.__qualname__ = "converted_" + code.__name__
    return triton.jit(copy)


OWN, CONVERTED = kernels.write_kv_kernel, variant(kernels.write_kv_kernel)


def call(op: str, name: str, backend: str, inputs: dict[str, Any]) -> None:
    """One call of a contender."""
    if op == "rope_write_kv":
        BACKEND_OPS[backend].rope_write_kv(**inputs)
        return
    kernels.write_kv_kernel = CONVERTED if name == "e5m2_converted" else OWN
    try:
        names = ("k", "v", "k_cache", "v_cache", "slot_mapping")
        BACKEND_OPS[backend].write_kv(*(inputs[each] for each in names))
    finally:
        kernels.write_kv_kernel = OWN


def differing(op: str, name: str, shape: dict[str, Any]) -> int:
    """Numbers in the pools that the reference stores otherwise: of the values, which no op computes with."""
    pools = []
    for backend in ("reference", "triton"):
        inputs = make_rope_inputs(**shape, cache_dtype=DTYPES[name])
        for pool in (inputs["k_cache"], inputs["v_cache"]):
            pool.view(torch.uint8).zero_()
        inputs["v"].mul_(20000.0)  # to subnormal numbers, ties and beyond the range
        inputs["v"][::2].mul_(2.0**-30)
        call(op, name, backend, inputs)
        pools.append(inputs["v_cache"].view(torch.uint8).clone())
    return int((pools[0] != pools[1]).sum())


@torch.no_grad()
def measure(tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row: the figures of every contender at one batch size."""
    shape = shape_of(tokens, args)
    row: dict[str, Any] = {"num_tokens": tokens, "differing": {}, "timings": {}}
    written = 2 * 2 * tokens * args.kv_heads * args.head_dim
    for op in ("write_kv", "rope_write_kv"):
        samplers: dict[str, Sampler] = {}
        for name, dtype in DTYPES.items():
            if name == "e5m2_converted" and op == "rope_write_kv":
                continue
            row["differing"][f"{op}/{name}"] = wrong = differing(op, name, shape)
            assert name == "e5m2_converted" or not wrong, (
                f"{op} into {name}: {wrong} numbers differ from the reference's"
            )
            sets = sets_of(shape | {"cache_dtype": dtype}, 4 * written)
            samplers[f"{op}/{name}"] = CudaSampler(
                [partial(call, op, name, "triton", inputs) for inputs in sets]
            )
        row["timings"] |= {
            name: asdict(timing) for name, timing in interleave(samplers, args.repeats).items()
        }
    return row


def main() -> None:
    args = command_line(__doc__, heads=32, kv_heads=8, head_dim=128, tokens=[1, 64, 512, 4096], repeats=60)
    result = begin(args) | {"rows": []}
    for tokens in args.tokens:
        row = measure(tokens, args)
        result["rows"].append(row)
        wrong = row["differing"]["write_kv/e5m2_converted"]
        print(f"T={tokens:<5} {figures_of(row)}  differing: {wrong}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
