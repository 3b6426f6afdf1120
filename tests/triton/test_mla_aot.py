"""Latent attention's Triton kernels compile at DeepSeek's sizes for GPUs that are not here."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import aot

from torchpaged.custom_ops.mla.triton import config
from torchpaged.custom_ops.mla.triton.attend import mla_kernel
from torchpaged.custom_ops.mla.triton.merge import merge_kernel

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
#: Bytes per thread that Hopper's may keep in local memory: its sums take half of 255 registers.
HOPPERS_SPILLS = 512


def compile_attend(target: str, dtype: str, heads: int, split: bool, rope: int = 64) -> Any:
    rows = 1 << (heads - 1).bit_length()
    tiles = config.tiles(512 + rope, rows, SIZES[dtype], target == "sm_90", hip=target.startswith("gfx"))
    constants = {
        "NUM_HEADS": heads,
        "RANK": 512,
        "RANK_PAD": 512,
        "ROPE": rope,
        "ROPE_PAD": rope,
        "BLOCK_SIZE": 16,
        "CAUSAL": True,
        "HAS_LSE": False,
        "lse_ptr": None,
        "SPLIT": split,
        "TILE_M": tiles.rows,
        "TILE_HEADS": min(tiles.rows, rows),
        "TILE_KV": tiles.keys,
        "INTERPRET": False,
    }
    pointers = dict.fromkeys(("q_ptr", "kv_ptr", "out_ptr"), dtype)
    pointers |= dict.fromkeys(("table_ptr", "seq_lens_ptr", "starts_ptr"), "i32")
    pointers |= dict.fromkeys(("part_acc_ptr", "part_state_ptr"), "fp32")
    launch = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return aot.compile_kernel(mla_kernel, target, pointers, constants, ("scale",), **launch)


@pytest.mark.parametrize(("dtype", "heads"), [("bf16", 128), ("bf16", 16), ("fp32", 128)])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_attend_compiles(target: str, dtype: str, heads: int) -> None:
    for split in (True, False):
        found = aot.resources(compile_attend(target, dtype, heads, split))
        assert found["shared"] <= aot.SHARED_LIMIT[target], found
        assert found["spilled"] <= (HOPPERS_SPILLS if target == "sm_90" and dtype != "fp32" else 0), found


def test_the_widest_rotated_keys_fit() -> None:
    found = aot.resources(compile_attend("sm_90", "bf16", 128, True, rope=config.MAX_ROPE))
    assert found["shared"] <= aot.SHARED_LIMIT["sm_90"], found


@pytest.mark.parametrize("target", aot.TARGETS)
def test_merge_compiles(target: str) -> None:
    sizes = {"NUM_HEADS": 128, "RANK": 512, "RANK_PAD": 512, "MAX_PARTS": config.MAX_PARTS, "HAS_LSE": False}
    pointers = {"part_acc_ptr": "fp32", "part_state_ptr": "fp32", "starts_ptr": "i32", "out_ptr": "bf16"}
    found = aot.resources(
        aot.compile_kernel(merge_kernel, target, pointers, {**sizes, "lse_ptr": None}, num_warps=4)
    )
    assert found["spilled"] == 0 and found["shared"] <= aot.SHARED_LIMIT[target], found
