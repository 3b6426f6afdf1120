"""The sampling kernels compile for sm_80, sm_90, sm_100 and gfx942 as they are launched, and spill nothing."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import aot

from torchpaged.custom_ops.triton import config
from torchpaged.custom_ops.triton.accept_tokens import _ROWS, _STOPS, accept_tokens_kernel
from torchpaged.custom_ops.triton.sample_tokens import GROUP, merge_tiles_kernel, sample_tiles, sample_tiles_kernel

POINTERS = {f"{name}_ptr": "fp32" for name in ("temperature", "top_p", "min_p", "penalty", "parts")}
POINTERS |= {"top_k_ptr": "i32", "seen_ptr": "i32", "indices_ptr": "i32", "seeds_ptr": "i64", "counters_ptr": "i64", "out_ptr": "i64"}


def check(compiled: Any, target: str) -> None:
    found = aot.resources(compiled)
    assert found["spilled"] == 0 and found["shared"] <= aot.SHARED_LIMIT[target], found


def pointers(kernel: Any, dtype: str) -> dict[str, str]:
    return {name: kind for name, kind in {**POINTERS, "logits_ptr": dtype}.items() if name in kernel.arg_names}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_scan_compiles(target: str, num_rows: int, dtype: str) -> None:
    tiles = sample_tiles(num_rows, 128256)
    constants = {"TILE": tiles.tile, "GROUP": GROUP, "PDL": target in ("sm_90", "sm_100")}
    compiled = aot.compile_kernel(
        sample_tiles_kernel, target, pointers(sample_tiles_kernel, dtype), constants, num_warps=tiles.tile_warps
    )  # fmt: skip
    check(compiled, target)
    if target != "gfx942":
        wide = "ld.global.v2" if dtype == "bf16" else "ld.global.v4"
        assert wide in compiled.asm["ptx"], "four logits per load"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("vocab_size", [128256, 262144])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_merge_compiles(target: str, vocab_size: int, dtype: str) -> None:
    tiles = sample_tiles(1, vocab_size)
    num_tiles = -(-vocab_size // tiles.tile)
    constants = {
        "TILES": config.next_power_of_2(num_tiles), "GROUPS": config.next_power_of_2(num_tiles * tiles.tile // GROUP), "GROUP": GROUP,
        "CHUNK": tiles.chunk, "PDL": target in ("sm_90", "sm_100"),
    }  # fmt: skip
    check(
        aot.compile_kernel(merge_tiles_kernel, target, pointers(merge_tiles_kernel, dtype), constants, num_warps=tiles.chunk_warps), target
    )


@pytest.mark.parametrize("target", aot.TARGETS)
def test_accept_compiles(target: str) -> None:
    kinds = {f"{name}_ptr": "i64" for name in ("sampled", "stop", "ids", "positions", "slots", "counters", "tokens")}
    kinds |= {f"{name}_ptr": "i32" for name in ("table", "lens", "remaining", "seen")}
    constants = {"BLOCK_SIZE": 16, "ROWS": _ROWS, "STOPS": _STOPS, "PDL": target in ("sm_90", "sm_100")}
    check(aot.compile_kernel(accept_tokens_kernel, target, kinds, constants, num_warps=1), target)
