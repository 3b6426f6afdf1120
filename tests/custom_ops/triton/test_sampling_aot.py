"""The sampling kernels compile for sm_80, sm_90, sm_100 and gfx942 as they are launched, and
spill nothing."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import aot

from torchpaged.custom_ops.layers.triton.embedding import embedding_kernel, num_warps_of
from torchpaged.custom_ops.step_end.triton.accept_tokens import STOPS, accept_tokens_kernel, rows_per_program
from torchpaged.custom_ops.step_end.triton.finish_step import finish_step_kernel
from torchpaged.custom_ops.step_end.triton.sample_tokens import (
    GROUP,
    merge_tiles_kernel,
    sample_tiles,
    sample_tiles_kernel,
)
from torchpaged.custom_ops.triton import launching

POINTERS = {f"{name}_ptr": "fp32" for name in ("temperature", "top_p", "min_p", "penalty", "parts")}
POINTERS |= {
    "top_k_ptr": "i32",
    "seen_ptr": "i32",
    "indices_ptr": "i32",
    "seeds_ptr": "i64",
    "counters_ptr": "i64",
    "out_ptr": "i64",
}


def check(compiled: Any, target: str) -> None:
    aot.check_spills(compiled)
    assert aot.resources(compiled)["shared"] <= aot.SHARED_LIMIT[target]


def pointers(kernel: Any, dtype: str) -> dict[str, str]:
    return {
        name: kind for name, kind in {**POINTERS, "logits_ptr": dtype}.items() if name in kernel.arg_names
    }


@pytest.mark.slow_cases(
    but=(
        "sm_90-1-bf16",
        "sm_90-64-fp32",
    )
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("num_rows", [1, 16, 32, 64])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_scan_compiles(target: str, num_rows: int, dtype: str) -> None:
    tiles = sample_tiles(num_rows, 128256)
    constants = {
        "TILE": tiles.tile,
        "TILES_EACH": tiles.tiles_each,
        "GROUP": GROUP,
        "READS_EARLY": True,
        "PDL": target in ("sm_90", "sm_100"),
    }
    compiled = aot.compile_kernel(
        sample_tiles_kernel,
        target,
        pointers(sample_tiles_kernel, dtype),
        constants,
        num_warps=tiles.tile_warps,
    )
    check(compiled, target)
    if target != "gfx942":
        wide = "ld.global.v2" if dtype == "bf16" else "ld.global.v4"
        assert wide in compiled.asm["ptx"], "four logits per load"
        assert "ld.global.v4" in compiled.asm["ptx"], "of a greedy row 16 bytes per load"


@pytest.mark.slow_cases(but=("sm_90-128256-bf16",))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("vocab_size", [128256, 262144])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_merge_compiles(target: str, vocab_size: int, dtype: str) -> None:
    tiles = sample_tiles(1, vocab_size)
    num_tiles = -(-vocab_size // tiles.tile)
    constants = {
        "TILES": launching.next_power_of_2(num_tiles),
        "GROUPS": launching.next_power_of_2(num_tiles * tiles.tile // GROUP),
        "GROUP": GROUP,
        "CHUNK": tiles.chunk,
        "PDL": target in ("sm_90", "sm_100"),
    }
    check(
        aot.compile_kernel(
            merge_tiles_kernel,
            target,
            pointers(merge_tiles_kernel, dtype),
            constants,
            num_warps=tiles.chunk_warps,
        ),
        target,
    )


@pytest.mark.slow_cases(but=("sm_90-True",))
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_finish_step_compiles(target: str, ring: bool) -> None:
    kinds = (
        POINTERS
        | {"logits_ptr": "bf16"}
        | {f"{name}_ptr": "i64" for name in ("stop", "ids", "positions", "slots", "tokens")}
    )
    kinds |= {f"{name}_ptr": "i32" for name in ("table", "lens", "remaining")}
    del kinds["out_ptr"]
    tiles = sample_tiles(64, 128256)
    num_tiles = -(-128256 // tiles.tile)
    constants = {
        "TILES": launching.next_power_of_2(num_tiles),
        "GROUPS": launching.next_power_of_2(num_tiles * tiles.tile // GROUP),
        "GROUP": GROUP,
        "CHUNK": tiles.chunk,
        "STEP": 0,
        "LAST": ring,
        "BLOCK_SIZE": 16,
        "STOPS": STOPS,
        "ALONE": False,
        "PDL": target in ("sm_90", "sm_100"),
    }
    if ring:
        kinds |= {"ring_ptr": "i64", "launches_ptr": "i64"}
    else:
        constants |= {"ring_ptr": None, "launches_ptr": None}
    check(
        aot.compile_kernel(finish_step_kernel, target, kinds, constants, num_warps=tiles.chunk_warps), target
    )


@pytest.mark.slow
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("num_reqs", [1, 64, 300])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_accept_compiles(target: str, num_reqs: int, ring: bool) -> None:
    kinds = {
        f"{name}_ptr": "i64"
        for name in ("sampled", "stop", "ids", "positions", "slots", "counters", "tokens")
    }
    kinds |= {f"{name}_ptr": "i32" for name in ("table", "lens", "remaining", "seen")}
    rows = rows_per_program(num_reqs)
    constants = {
        "STEP": 0,
        "LAST": ring,
        "BLOCK_SIZE": 16,
        "ROWS": rows,
        "STOPS": STOPS,
        "ALONE": num_reqs <= rows,
        "PDL": target in ("sm_90", "sm_100"),
    }
    if ring:
        kinds |= {"ring_ptr": "i64", "launches_ptr": "i64"}
    else:
        constants |= {"ring_ptr": None, "launches_ptr": None}
    check(aot.compile_kernel(accept_tokens_kernel, target, kinds, constants, num_warps=rows // 32), target)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("width", [960, 4096, 16384])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_embedding_compiles(target: str, width: int, scaled: bool) -> None:
    kinds = {"ids_ptr": "i64", "weight_ptr": "bf16", "out_ptr": "bf16"} | (
        {"scale_ptr": "fp32"} if scaled else {}
    )
    constants = {
        "WIDTH": width,
        "WIDTH_PAD": launching.next_power_of_2(width),
        "PDL": target in ("sm_90", "sm_100"),
    }
    constants |= {} if scaled else {"scale_ptr": None}
    compiled = aot.compile_kernel(
        embedding_kernel, target, kinds, constants, num_warps=num_warps_of(width, 2)
    )
    check(compiled, target)
    if target != "gfx942":
        assert "ld.global.v4.b32" in compiled.asm["ptx"], "16 bytes per load"
    if target == "sm_90":
        wait, start = (
            compiled.asm["ptx"].index(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents")
        )
        assert wait < start, "attention behind it reads early what was written ahead of it"
