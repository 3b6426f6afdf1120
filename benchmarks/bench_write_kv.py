"""write_kv, rope_write_kv and the unfused sequence (torch-compiled norm and rotation, then write_kv) on
a GPU.

    PYTHONPATH=. python benchmarks/bench_write_kv.py [--heads 32 --kv-heads 8 --head-dim 128]
        [--tokens 1,8,64,256] [--norm] [--tiles 4x1,8x2]

A correctness gate runs before every timing. Each round is one CUDA graph over several sets of tokens, outputs
and pools, replayed back to back, the contenders in turns; figures are microseconds per call. Up to 64 sets
are used: at few tokens they stay in the L2 cache, as a fresh qkv projection does in a model. ``empty`` is a
kernel that does nothing, ``ideal_us`` the op's bytes over ``--bandwidth``. ``--tiles`` also times other
choices of (heads per program)x(warps). The last line is one JSON document.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from documents import command_line
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from measuring import conditions
from measuring.timing import Call, CudaSampler, interleave
from op_inputs.rope import assert_rope_close, make_rope_inputs

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.cache_write.triton import rope_write_kv as kernels

TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]
ROUND_BYTES, MAX_SETS = 192 << 20, 64


@triton.jit
def empty_kernel(x_ptr):
    """Nothing: what a launch costs inside a graph."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """HuggingFace's rotate-half formula on ``x [T, H, D]``, left to the compiler to fuse."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def norm_and_rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
    """RMSNorm as Qwen3 has it, if there is a weight, and the rotation."""
    if weight is not None:
        wide = x.float()
        x = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return rotate(x, cos, sin)


def unfused(inputs: dict[str, Any]) -> Tensor:
    """The sequence that rope_write_kv replaces, for torch.compile. The cosines are gathered here, in the
    same kernel."""
    cos, sin = (x.repeat(1, 2)[:, None] for x in inputs["cos_sin"][inputs["positions"]].chunk(2, dim=-1))
    q = norm_and_rotate(inputs["q"], inputs.get("q_norm"), cos, sin)
    k = norm_and_rotate(inputs["k"], inputs.get("k_norm"), cos, sin)
    TRITON.write_kv(k, inputs["v"], inputs["k_cache"], inputs["v_cache"], inputs["slot_mapping"])
    return q


def write_only(inputs: dict[str, Any]) -> None:
    TRITON.write_kv(*(inputs[name] for name in ("k", "v", "k_cache", "v_cache", "slot_mapping")))


def with_tiles(tiles: tuple[int, int], inputs: dict[str, Any]) -> None:
    """rope_write_kv with ``(heads per program, num_warps)`` in place of the kernel's own choice."""
    own = kernels.head_tiles
    kernels.head_tiles = lambda *_: tiles
    try:
        TRITON.rope_write_kv(**inputs)
    finally:
        kernels.head_tiles = own


def check(
    shape: dict[str, Any], compiled: Callable[[dict[str, Any]], Tensor], tiles: list[tuple[int, int]]
) -> None:
    """Every contender against the reference; raises AssertionError."""
    assert_rope_close(TRITON, make_rope_inputs(**shape))
    want, got = make_rope_inputs(**shape), make_rope_inputs(**shape)
    REFERENCE.rope_write_kv(**want)
    got["q_out"] = compiled(got)
    for choice in (None, *tiles):
        if choice is not None:
            got = make_rope_inputs(**shape)
            with_tiles(choice, got)
        for name in ("q_out", "k_cache", "v_cache"):
            torch.testing.assert_close(got[name], want[name], rtol=2e-2, atol=6e-2, equal_nan=True)


def shape_of(tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    sizes = {"num_heads": args.heads, "num_kv_heads": args.kv_heads, "head_dim": args.head_dim}
    return {"num_tokens": tokens, **sizes, "dtype": torch.bfloat16, "device": "cuda"}


def sets_of(shape: dict[str, Any], moved: int) -> list[dict[str, Any]]:
    """Arguments of as many calls as a round has, each of which moves so many bytes; no token is skipped."""
    sets = []
    for seed in range(max(4, min(MAX_SETS, ROUND_BYTES // moved))):
        inputs = make_rope_inputs(**shape, seed=seed)
        num_slots = inputs["k_cache"].shape[0] * inputs["k_cache"].shape[1]
        inputs["slot_mapping"] = torch.randperm(num_slots, device="cuda")[: shape["num_tokens"]]
        sets.append(inputs)
    return sets


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """The document, without its rows."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    shape = f"{args.heads}/{args.kv_heads}/{args.head_dim}"
    return {"conditions": conditions.collect(torch.device("cuda")), "shape": shape}


def figures_of(row: dict[str, Any]) -> str:
    return "  ".join(f"{name} {timing['median_us']:.2f}" for name, timing in row["timings"].items())


@torch.no_grad()
def measure(tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row: the figures of every contender at one batch size."""
    shape = shape_of(tokens, args) | {"norms": ("q_norm", "k_norm") if args.norm else ()}
    torch.compiler.reset()
    compiled = torch.compile(unfused, fullgraph=True, dynamic=False)
    check(shape, compiled, args.tiles)
    # read and written, 2 bytes a number
    q_bytes, kv_bytes = (2 * 2 * tokens * n * args.head_dim for n in (args.heads, 2 * args.kv_heads))
    cos_bytes = 4 * tokens * args.head_dim
    sets = sets_of(shape, q_bytes + kv_bytes)
    contenders: dict[str, Callable[[dict[str, Any]], Any]] = {
        "empty": lambda inputs: empty_kernel[(1,)](inputs["q"], num_warps=1),
        "write_kv": write_only,
        "rope_write_kv": lambda inputs: TRITON.rope_write_kv(**inputs),
        "unfused": compiled,
    }
    contenders |= {f"rope_write_kv[{h}x{w}]": partial(with_tiles, (h, w)) for h, w in args.tiles}
    calls: dict[str, list[Call]] = {
        name: [partial(run, inputs) for inputs in sets] for name, run in contenders.items()
    }
    timings = interleave({name: CudaSampler(round_) for name, round_ in calls.items()}, args.repeats)
    ideal = {"write_kv": kv_bytes, "rope_write_kv": q_bytes + kv_bytes + cos_bytes}
    return {
        "num_tokens": tokens,
        "sets": len(sets),
        "ideal_us": {name: n / args.bandwidth / 1e6 for name, n in ideal.items()},
        "write_kv_beyond_bytes_us": timings["write_kv"].median_us - kv_bytes / args.bandwidth / 1e6,
        "unfused_over_fused": timings["unfused"].median_us / timings["rope_write_kv"].median_us,
        "timings": {name: asdict(timing) for name, timing in timings.items()},
    }


def _tiles(text: str) -> list[tuple[int, int]]:
    pairs = [pair.split("x") for pair in text.split(",")]
    return [(int(heads), int(warps)) for heads, warps in pairs]


def main() -> None:
    args = command_line(
        __doc__,
        heads=32,
        kv_heads=8,
        head_dim=128,
        tokens=[1, 8, 64, 256],
        norm=(False, "with RMSNorm of q and k"),
        tiles={
            "type": _tiles,
            "default": [],
            "help": "further (heads per program)x(warps), e.g. 4x1,8x2,16x4",
        },
        repeats=60,
        bandwidth=(4.35, "of the memory, in TB/s; the default is an H200's"),
    )
    result = begin(args)
    result |= {"norm": args.norm, "bandwidth_tb_s": args.bandwidth, "rows": []}
    print(f"{result['shape']}, bf16, norm {args.norm}; us per call (ideal: write_kv, rope_write_kv)")
    for tokens in args.tokens:
        row = measure(tokens, args)
        result["rows"].append(row)
        ideal = ", ".join(f"{us:.2f}" for us in row["ideal_us"].values())
        print(
            f"T={tokens:<5} {figures_of(row)}  ({ideal})  unfused/fused {row['unfused_over_fused']:.2f}",
            flush=True,
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
