"""Every kernel compiles for sm_80, sm_90, sm_100 and gfx942 on a machine without a GPU; the default tiles spill nothing."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from torchpaged.custom_ops.triton import config
from torchpaged.custom_ops.triton.advance_step import advance_step_kernel
from torchpaged.custom_ops.triton.copy_blocks import copy_blocks_kernel
from torchpaged.custom_ops.triton.decode import decode_kernel, merge_kernel
from torchpaged.custom_ops.triton.merge_attn_states import merge_attn_states_kernel
from torchpaged.custom_ops.triton.rope_write_kv import head_tiles, rope_write_kv_kernel
from torchpaged.custom_ops.triton.write_kv import write_kv_kernel

_spec = importlib.util.spec_from_file_location("aot", Path(__file__).with_name("aot.py"))
assert _spec and _spec.loader
aot = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(aot)

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
INT_POINTERS = {"table_ptr": "i32", "seq_lens_ptr": "i32", "starts_ptr": "i32"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"WINDOW_LEFT": 100, "CHUNK": 256, "SOFT_CAP": True, "ALIBI": True, "SINKS": True, "HAS_LSE": True},
}


def attention_arguments(
    dtype: str, dim: int, group: int, options: dict[str, Any], kv_dtype: str | None = None
) -> tuple[dict[str, str], dict[str, Any]]:
    flags = {
        "GROUP": group, "DIM": dim, "DIM_PAD": config.next_power_of_2(dim), "DIM_V": dim, "DIM_V_PAD": config.next_power_of_2(dim),
        "BLOCK_SIZE": 16, "CAUSAL": True, "WINDOW_LEFT": -1, "WINDOW_RIGHT": -1, "CHUNK": 0, "SOFT_CAP": False, "ALIBI": False,
        "SINKS": False, "KV_SCALES": False, "HAS_LSE": False, "INTERPRET": False, **options,
    }  # fmt: skip
    kv = kv_dtype or dtype
    pointers = {**INT_POINTERS, "q_ptr": dtype, "k_ptr": kv, "v_ptr": kv, "out_ptr": dtype}
    for name, flag, kind in (("lse_ptr", "HAS_LSE", "fp32"), ("slopes_ptr", "ALIBI", "fp32"), ("sinks_ptr", "SINKS", dtype),
                             ("k_scale_ptr", "KV_SCALES", "fp32"), ("v_scale_ptr", "KV_SCALES", "fp32")):  # fmt: skip
        if flags[flag]:
            pointers[name] = kind
        else:
            flags[name] = None
    return pointers, flags


def check(compiled: Any, target: str, no_spills: bool) -> None:
    found = aot.resources(compiled)
    assert found["shared"] <= aot.SHARED_LIMIT[target], found
    if no_spills:
        assert found["spilled"] == 0, found


CASES = [
    ("bf16", 128, 4, "plain"),
    ("bf16", 64, 3, "plain"),
    ("bf16", 128, 4, "everything"),
    ("fp16", 80, 8, "plain"),
    ("fp32", 64, 3, "plain"),
    ("bf16", 256, 8, "plain"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
@pytest.mark.parametrize("target", aot.TARGETS)
def test_decode_compiles(target: str, case: tuple[str, int, int, str]) -> None:
    dtype, dim, group, options = case
    pointers, flags = attention_arguments(dtype, dim, group, OPTIONS[options])
    pointers |= {"part_acc_ptr": "fp32", "part_state_ptr": "fp32"}
    tiles = config.decode_tiles(dim, group, SIZES[dtype])
    constants = {**flags, "QUERY_LEN": 1, "TILE_M": tiles.rows, "TILE_KV": tiles.keys, "DIRECT": False}
    compiled = aot.compile_kernel(
        decode_kernel, target, pointers, constants, ("scale", "soft_cap"), num_warps=tiles.num_warps, num_stages=tiles.num_stages
    )
    check(compiled, target, no_spills=target != "gfx942")
    if target != "gfx942" and dtype == "bf16" and options == "plain":
        text = compiled.asm["ptx"]
        assert "cp.async.cg.shared.global" in text or "ld.global.v4" in text, "16-byte loads of keys and values"


def test_fp8_caches_compile_for_sm_90() -> None:
    pointers, flags = attention_arguments("bf16", 128, 4, {"KV_SCALES": True}, kv_dtype="fp8e4nv")
    pointers |= {"part_acc_ptr": "fp32", "part_state_ptr": "fp32"}
    constants = {**flags, "QUERY_LEN": 1, "TILE_M": 16, "TILE_KV": 64, "DIRECT": False}
    check(aot.compile_kernel(decode_kernel, "sm_90", pointers, constants, ("scale", "soft_cap"), num_warps=4, num_stages=3), "sm_90", True)


@pytest.mark.parametrize("target", aot.TARGETS)
def test_small_kernels_compile(target: str) -> None:
    merge = {"GROUP": 4, "QUERY_LEN": 1, "DIM_V": 128, "DIM_V_PAD": 128, "TILE_M": 16, "SINKS": False, "KV_SCALES": False, "HAS_LSE": False}
    merge |= {"lse_ptr": None, "sinks_ptr": None, "v_scale_ptr": None}
    pointers = {"starts_ptr": "i32", "out_ptr": "bf16", "part_acc_ptr": "fp32", "part_state_ptr": "fp32"}
    check(aot.compile_kernel(merge_kernel, target, pointers, merge, num_warps=4), target, True)
    write = {"NUM_HEADS": 8, "HEADS_PAD": 8, "DIM": 128, "DIM_PAD": 128, "DIM_V": 128, "DIM_V_PAD": 128, "BLOCK_SIZE": 16}
    write |= {"HAS_SCALE": False, "LIMIT": 0.0, "k_scale_ptr": None, "v_scale_ptr": None}
    pointers = {"k_ptr": "bf16", "v_ptr": "bf16", "k_cache_ptr": "bf16", "v_cache_ptr": "bf16", "slot_ptr": "i64"}
    check(aot.compile_kernel(write_kv_kernel, target, pointers, write, num_warps=4), target, True)
    pointers = {"a_ptr": "bf16", "lse_a_ptr": "fp32", "b_ptr": "bf16", "lse_b_ptr": "fp32", "out_ptr": "bf16", "lse_ptr": "fp32"}
    check(
        aot.compile_kernel(merge_attn_states_kernel, target, pointers, {"DIM": 128, "DIM_PAD": 128, "HAS_LSE": True}, num_warps=1),
        target,
        True,
    )
    pointers = {"cache_ptr": "bf16", "mapping_ptr": "i64"}
    check(
        aot.compile_kernel(copy_blocks_kernel, target, pointers, {"NUM_HEADS": 8, "DIM": 128, "SIZE": 16384, "PIECE": 1024}), target, True
    )
    pointers = {"sampled_ptr": "i64", "table_ptr": "i32", "ids_ptr": "i64", "positions_ptr": "i64", "lens_ptr": "i32", "slots_ptr": "i64"}
    check(aot.compile_kernel(advance_step_kernel, target, pointers, {"BLOCK_SIZE": 16, "ROWS": 128}), target, True)


ROPE = {  # (num_heads, num_kv_heads, head_dim, rotary_dim), num_tokens, options
    "one_token": ((32, 8, 128, 128), 1, {}),
    "many_tokens": ((32, 8, 128, 128), 512, {}),
    "smollm2": ((9, 3, 64, 64), 8, {}),
    "qwen3": ((32, 8, 128, 128), 8, {"norms": True}),
    "gptj": ((16, 16, 256, 64), 8, {"INTERLEAVED": True}),
    "phi": ((32, 32, 80, 32), 8, {"norms": True}),
    "fp8": ((32, 8, 128, 128), 8, {"fp8": True}),
}


@pytest.mark.parametrize("case", ROPE)
@pytest.mark.parametrize("target", aot.TARGETS)
def test_rope_write_kv_compiles(target: str, case: str) -> None:
    (heads, kv_heads, dim, rotary), num_tokens, options = ROPE[case]
    fp8 = options.get("fp8", False)
    if fp8 and target in ("sm_80", "gfx942"):
        pytest.skip("float8_e4m3fn needs compute capability 8.9")
    pads = {"HALF_PAD": config.next_power_of_2(rotary // 2), "PASS_PAD": config.next_power_of_2(dim - rotary)}
    width = config.next_power_of_2(dim)
    tile, num_warps = head_tiles(num_tokens, heads, kv_heads, max(*pads.values(), width // 2), 2)
    constants: dict[str, Any] = {
        "NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "HEADS": tile, "DIM": dim, "ROTARY": rotary, **pads, "DIM_V": dim,
        "DIM_V_PAD": width, "BLOCK_SIZE": 16, "INTERLEAVED": options.get("INTERLEAVED", False), "LIMIT": 448.0 if fp8 else 0.0,
    }  # fmt: skip
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_out_ptr"), "bf16") | {"cos_sin_ptr": "fp32"}
    pointers |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "fp8e4nv" if fp8 else "bf16")
    pointers |= dict.fromkeys(("positions_ptr", "slot_ptr"), "i64")
    for names, given, kind in ((("q_norm_ptr", "k_norm_ptr"), options.get("norms"), "bf16"), (("k_scale_ptr", "v_scale_ptr"), fp8, "fp32")):
        (pointers if given else constants).update(dict.fromkeys(names, kind if given else None))
    compiled = aot.compile_kernel(rope_write_kv_kernel, target, pointers, constants, ("norm_eps", "norm_offset"), num_warps=num_warps)
    check(compiled, target, no_spills=True)
    if target != "gfx942":
        assert "ld.global.v4" in compiled.asm["ptx"] and "st.global.v4" in compiled.asm["ptx"], "16-byte accesses"
        narrow = re.findall(r"st\.global\.(?:b8|b16|b32)", compiled.asm["ptx"])
        assert rotary < dim or not narrow, narrow  # a small part of a head does not fill a warp with 16-byte accesses
