"""Every kernel compiles for sm_80, sm_90, sm_100 and gfx942 on a machine without a GPU; the default tiles
spill nothing."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import aot

from torchpaged.custom_ops.attention.triton import config
from torchpaged.custom_ops.attention.triton.decode import decode_kernel
from torchpaged.custom_ops.attention.triton.merge_attn_states import merge_attn_states_kernel
from torchpaged.custom_ops.block_ops.triton.copy_blocks import copy_blocks_kernel
from torchpaged.custom_ops.cache_write.triton.rope_write_kv import head_tiles, rope_write_kv_kernel
from torchpaged.custom_ops.cache_write.triton.write_kv import write_kv_kernel
from torchpaged.custom_ops.step_end.triton.advance_step import advance_step_kernel
from torchpaged.custom_ops.triton import launching

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
INT_POINTERS = {"table_ptr": "i32", "seq_lens_ptr": "i32", "starts_ptr": "i32"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kv_scales": {"KV_SCALES": True},
    "tree, window, alibi": {"TREE": True, "WINDOW_LEFT": 100, "ALIBI": True},
    "everything": {
        "WINDOW_LEFT": 100,
        "CHUNK": 256,
        "SOFT_CAP": True,
        "ALIBI": True,
        "SINKS": True,
        "HAS_LSE": True,
    },
}
EARLY = ("sm_90", "sm_100")  # programmatic dependent launch


def attention_arguments(
    dtype: str, dim: int, group: int, options: dict[str, Any], kv_dtype: str | None = None
) -> tuple[dict[str, str], dict[str, Any]]:
    flags = {
        "GROUP": group,
        "DIM": dim,
        "DIM_PAD": launching.next_power_of_2(dim),
        "DIM_V": dim,
        "DIM_V_PAD": launching.next_power_of_2(dim),
        "BLOCK_SIZE": 16,
        "CAUSAL": True,
        "WINDOW_LEFT": -1,
        "WINDOW_RIGHT": -1,
        "CHUNK": 0,
        "SOFT_CAP": False,
        "ALIBI": False,
        "SINKS": False,
        "KV_SCALES": False,
        "HAS_LSE": False,
        "TREE": False,
        "INTERPRET": False,
        **options,
    }
    kv = kv_dtype or dtype
    pointers = {**INT_POINTERS, "q_ptr": dtype, "k_ptr": kv, "v_ptr": kv, "out_ptr": dtype}
    for name, flag, kind in (
        ("lse_ptr", "HAS_LSE", "fp32"),
        ("slopes_ptr", "ALIBI", "fp32"),
        ("sinks_ptr", "SINKS", dtype),
        ("k_scale_ptr", "KV_SCALES", "fp32"),
        ("v_scale_ptr", "KV_SCALES", "fp32"),
        ("tree_ptr", "TREE", "i64"),
    ):
        if flags[flag]:
            pointers[name] = kind
        else:
            flags[name] = None
    return pointers, flags


def check(compiled: Any, target: str, no_spills: bool) -> None:
    found = aot.resources(compiled)
    assert found["shared"] <= aot.SHARED_LIMIT[target], found
    if no_spills:
        aot.check_spills(compiled)


CASES = [
    ("bf16", 128, 4, "plain"),
    ("bf16", 64, 3, "plain"),
    ("bf16", 128, 4, "everything"),
    ("fp16", 80, 8, "plain"),
    ("fp32", 64, 3, "plain"),
    ("bf16", 256, 8, "plain"),
]


def compile_decode(
    target: str, case: tuple[str, int, int, str], kv_dtype: str | None = None, **changed: Any
) -> Any:
    """As `paged_attention` launches it, for 8 kv heads, contiguous pools and one query token."""
    dtype, dim, group, options = case
    pointers, flags = attention_arguments(dtype, dim, group, OPTIONS[options], kv_dtype)
    pointers |= {"part_acc_ptr": "fp32", "part_state_ptr": "fp32", "semaphore_ptr": "i32"}
    nvidia, slot = target.startswith("sm"), 8 * dim
    rows = launching.next_power_of_2(group)
    tiles = config.decode_tiles(dim, rows, SIZES.get(kv_dtype or dtype, 1), SIZES[dtype], hip=not nvidia)
    strides = {
        f"{name}_{part}": size
        for name in "KV"
        for part, size in (("BLOCK", 16 * slot), ("SLOT", slot), ("HEAD", dim))
    }
    constants = {
        **flags,
        **strides,
        "QUERY_LEN": 1,
        "NUM_KV_HEADS": 8,
        "TILE_M": tiles.rows,
        "TILE_KV": tiles.keys,
        "SLICES": tiles.slices,
        "REQS": 128,
        "ONE_SCAN": True,
        "LONGEST": 0,
        "MIN_TILES": tiles.min_tiles,
        "ROWS": rows,
        "PARTS": config.merged_parts(dim),
        "PDL": target in ("sm_90", "sm_100"),
        **changed,
    }
    launch = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    if nvidia:
        launch["maxnreg"] = config.max_registers(tiles)
    return aot.compile_kernel(decode_kernel, target, pointers, constants, ("scale", "soft_cap"), **launch)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
@pytest.mark.parametrize("target", aot.TARGETS)
def test_decode_compiles(target: str, case: tuple[str, int, int, str]) -> None:
    dtype, _, _, options = case
    compiled = compile_decode(target, case)
    check(compiled, target, no_spills=target == "sm_90" and options == "plain" and dtype != "fp32")
    if target != "gfx942" and dtype == "bf16" and options == "plain":
        assert "cp.async.cg.shared.global" in compiled.asm["ptx"], "16-byte copies of keys and values"


@pytest.mark.parametrize(
    "changed", [{"REQS": 1024, "ONE_SCAN": False}, {"BLOCK_SIZE": 8}, {"BLOCK_SIZE": 64}], ids=str
)
def test_decode_options_compile(changed: dict[str, Any]) -> None:
    check(compile_decode("sm_90", CASES[0], **changed), "sm_90", True)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_decode_of_trees_compiles(target: str) -> None:
    case = ("bf16", 128, 4, "tree, window, alibi")
    check(compile_decode(target, case, QUERY_LEN=2, ROWS=8), target, target == "sm_90")


def innermost_loop(ptx: str) -> str:
    """The loop around the matrix products."""
    lines = ptx.split("\n")
    products = [i for i, line in enumerate(lines) if "mma.sync" in line]
    label = next(i for i in range(products[0], 0, -1) if lines[i].startswith("$L__BB"))
    name = lines[label].split(":")[0]
    end = next(i for i in range(products[-1], len(lines)) if "bra" in lines[i] and name in lines[i])
    return "\n".join(lines[label:end])


@pytest.mark.parametrize("group", [4, 8])
def test_decode_loop_stays_in_registers(group: int) -> None:
    """Scores become probabilities without a trip through shared memory; 8 queries fill a product; loads of 16
    bytes only."""
    loop = innermost_loop(compile_decode("sm_90", ("bf16", 128, group, "plain")).asm["ptx"])
    assert "st.shared" not in loop and "ld.shared" not in loop
    assert loop.count("mma.sync") == loop.count("cp.async.cg") == loop.count("ldmatrix.sync") == 2 * 128 // 16
    assert loop.count("bar.sync") == 2


def test_fp8_caches_compile_for_sm_90() -> None:
    check(compile_decode("sm_90", ("bf16", 128, 4, "kv_scales"), kv_dtype="fp8e4nv"), "sm_90", True)


def early_steps(compiled: Any) -> list[str]:
    """What orders a cache write and its neighbours in the launch, in the order of the code; each once per run
    of the same."""
    found = re.findall(r"griddepcontrol\.\w+|st\.global|fence\.acq_rel\.gpu", compiled.asm["ptx"])
    return [step for i, step in enumerate(found) if i == 0 or step != found[i - 1]]


LETS_READ_EARLY = ["griddepcontrol.launch_dependents", "griddepcontrol.wait", "st.global"]
READ_WHEN_WRITTEN = ["griddepcontrol.wait", "st.global", "fence.acq_rel.gpu"]


@pytest.mark.parametrize("target", aot.TARGETS)
def test_small_kernels_compile(target: str) -> None:
    write = {
        "NUM_HEADS": 8,
        "HEADS_PAD": 8,
        "DIM": 128,
        "DIM_PAD": 128,
        "DIM_V": 128,
        "DIM_V_PAD": 128,
        "BLOCK_SIZE": 16,
    }
    write |= {
        "HAS_SCALE": False,
        "LIMIT": 0.0,
        "k_scale_ptr": None,
        "v_scale_ptr": None,
        "PDL": target in EARLY,
    }
    pointers = {
        "k_ptr": "bf16",
        "v_ptr": "bf16",
        "k_cache_ptr": "bf16",
        "v_cache_ptr": "bf16",
        "slot_ptr": "i64",
    }
    for are_query_tokens in (False, True):
        written = aot.compile_kernel(
            write_kv_kernel, target, pointers, write | {"ARE_QUERY_TOKENS": are_query_tokens}, num_warps=4
        )
        check(written, target, True)
        if target in EARLY:
            assert early_steps(written) == (LETS_READ_EARLY if are_query_tokens else READ_WHEN_WRITTEN)
    pointers = {
        "a_ptr": "bf16",
        "lse_a_ptr": "fp32",
        "b_ptr": "bf16",
        "lse_b_ptr": "fp32",
        "out_ptr": "bf16",
        "lse_ptr": "fp32",
    }
    check(
        aot.compile_kernel(
            merge_attn_states_kernel,
            target,
            pointers,
            {"DIM": 128, "DIM_PAD": 128, "HAS_LSE": True},
            num_warps=1,
        ),
        target,
        True,
    )
    pointers = {"cache_ptr": "bf16", "mapping_ptr": "i64"}
    copy = {"NUM_HEADS": 8, "DIM": 128, "SIZE": 16384, "PIECE": 1024, "PDL": target in EARLY}
    copied = aot.compile_kernel(copy_blocks_kernel, target, pointers, copy)
    check(copied, target, True)
    if target in EARLY:
        assert early_steps(copied) == ["st.global", "fence.acq_rel.gpu"]
    pointers = {
        "sampled_ptr": "i64",
        "table_ptr": "i32",
        "ids_ptr": "i64",
        "positions_ptr": "i64",
        "lens_ptr": "i32",
        "slots_ptr": "i64",
    }
    check(
        aot.compile_kernel(advance_step_kernel, target, pointers, {"BLOCK_SIZE": 16, "ROWS": 128}),
        target,
        True,
    )


@pytest.mark.parametrize("kind", ["fp8e4nv", "fp8e5"])
def test_fp8_writes_keep_nan(kind: str) -> None:
    """The clamp into an fp8 dtype's range must not be the kind of minimum and maximum that drops NaN."""
    write = {
        "NUM_HEADS": 8,
        "HEADS_PAD": 8,
        "DIM": 128,
        "DIM_PAD": 128,
        "DIM_V": 128,
        "DIM_V_PAD": 128,
        "BLOCK_SIZE": 16,
    }
    write |= {"HAS_SCALE": True, "LIMIT": 448.0, "PDL": True, "ARE_QUERY_TOKENS": False}
    pointers = {"k_ptr": "bf16", "v_ptr": "bf16", "k_cache_ptr": kind, "v_cache_ptr": kind, "slot_ptr": "i64"}
    pointers |= {"k_scale_ptr": "fp32", "v_scale_ptr": "fp32"}
    ptx = aot.compile_kernel(write_kv_kernel, "sm_90", pointers, write, num_warps=4).asm["ptx"]
    clamps = re.findall(r"\b(?:min|max)[.\w]*f32", ptx)
    assert clamps and all("NaN" in clamp for clamp in clamps), set(clamps)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_e5m2_is_written_by_our_own_rounding(target: str) -> None:
    """Not by Triton's conversion, which under 3.6 on sm_80 makes -0 of NaN; tests/ops/test_fp8_writes.py
    checks what ours gives."""
    write = {
        "NUM_HEADS": 8,
        "HEADS_PAD": 8,
        "DIM": 128,
        "DIM_PAD": 128,
        "DIM_V": 128,
        "DIM_V_PAD": 128,
        "BLOCK_SIZE": 16,
    }
    write |= {"HAS_SCALE": True, "LIMIT": 57344.0, "PDL": target != "sm_80", "ARE_QUERY_TOKENS": False}
    pointers = {
        "k_ptr": "bf16",
        "v_ptr": "bf16",
        "k_cache_ptr": "fp8e5",
        "v_cache_ptr": "fp8e5",
        "slot_ptr": "i64",
    }
    pointers |= {"k_scale_ptr": "fp32", "v_scale_ptr": "fp32"}
    ptx = aot.compile_kernel(write_kv_kernel, target, pointers, write, num_warps=4).asm["ptx"]
    assert re.findall(r"\bcvt\.f32\.bf16", ptx) and not re.findall(r"\bcvt[.\w]*(?:f16x?2?\.f32|e5m2)", ptx)


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
    pads = {
        "HALF_PAD": launching.next_power_of_2(rotary // 2),
        "PASS_PAD": launching.next_power_of_2(dim - rotary),
    }
    width = launching.next_power_of_2(dim)
    tile, num_warps = head_tiles(num_tokens, heads, kv_heads, max(*pads.values(), width // 2), 2)
    constants: dict[str, Any] = {
        "NUM_HEADS": heads,
        "NUM_KV_HEADS": kv_heads,
        "HEADS": tile,
        "DIM": dim,
        "ROTARY": rotary,
        **pads,
        "DIM_V": dim,
        "DIM_V_PAD": width,
        "BLOCK_SIZE": 16,
        "INTERLEAVED": options.get("INTERLEAVED", False),
        "LIMIT": 448.0 if fp8 else 0.0,
        "ARE_QUERY_TOKENS": case != "many_tokens",
        "PDL": target in EARLY,
    }
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_out_ptr"), "bf16") | {"cos_sin_ptr": "fp32"}
    pointers |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "fp8e4nv" if fp8 else "bf16")
    pointers |= dict.fromkeys(("positions_ptr", "slot_ptr"), "i64")
    for names, given, kind in (
        (("q_norm_ptr", "k_norm_ptr"), options.get("norms"), "bf16"),
        (("k_scale_ptr", "v_scale_ptr"), fp8, "fp32"),
    ):
        (pointers if given else constants).update(dict.fromkeys(names, kind if given else None))
    compiled = aot.compile_kernel(
        rope_write_kv_kernel, target, pointers, constants, ("norm_eps", "norm_offset"), num_warps=num_warps
    )
    check(compiled, target, no_spills=True)
    if target in EARLY:
        assert early_steps(compiled) == (READ_WHEN_WRITTEN if case == "many_tokens" else LETS_READ_EARLY)
    if target != "gfx942":
        assert "ld.global.v4" in compiled.asm["ptx"] and "st.global.v4" in compiled.asm["ptx"], (
            "16-byte accesses"
        )
        narrow = re.findall(r"st\.global\.(?:b8|b16|b32)", compiled.asm["ptx"])
        # a small part of a head does not fill a warp with 16-byte accesses
        assert rotary < dim or not narrow, narrow
