"""The CUDA C++ prefill kernel without a GPU: nvcc compiles its specialisations; no spills, no serialised
products, the order that overlaps them."""

import ctypes
import importlib.util
import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_sources import check_no_spills, compiled, needs_nvcc, registers
from specialisations import specialisation
from torch import Tensor

from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.attention.cuda import prefill_shape as prefill
from torchpaged.custom_ops.attention.cuda.call_params import refuse_sinks
from torchpaged.custom_ops.attention.cuda.prefill_shape import Mode
from torchpaged.custom_ops.attention.cuda.tensor_maps import pool_box, refuse_layout
from torchpaged.custom_ops.cuda import jit
from torchpaged.custom_ops.cuda.config import Config
from torchpaged.custom_ops.cuda.params import struct_of
from torchpaged.custom_ops.mla.cuda.pool_map import pool_box as pool_box_of_latents

_TRITON = importlib.util.find_spec("triton")
NVDISASM = shutil.which("nvdisasm") or shutil.which(
    "nvdisasm", path=str(Path(_TRITON.origin or "").parent / "backends/nvidia/bin") if _TRITON else None
)

EVERYTHING = {
    "window_left": 100,
    "chunk_size": 77,
    **dict.fromkeys(("soft_cap", "alibi", "sinks", "lse"), True),
}
PREFIXES = {"split": True, "cascade": True, "causal": False}
FP8_QUERIES: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn, "scales": True, "fp8_queries": True}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"group": 4},
    "llama, lse": {"group": 4, "lse": True},
    "no group": {"group": 1, "num_kv_heads": 32},
    "group of 7": {"group": 7, "num_kv_heads": 4},
    "width 64": {"dim": 64},
    "not causal": {"causal": False},
    "fp16, blocks of 128": {"dtype": torch.float16, "block_size": 128},
    "blocks of 8": {"block_size": 8},
    "width 64, lse, sinks": {"dim": 64, "lse": True, "sinks": True},
    "width 64, window": {"dim": 64, "window_left": 127, "sinks": True},
    "width 96": {"dim": 96, "group": 1},
    "width 80": {"dim": 80, "group": 5},
    "width 80, window, lse, sinks": {"dim": 80, "group": 1, "window_left": 127, "lse": True, "sinks": True},
    "width 48": {"dim": 48},
    "width 112, fp16": {"dim": 112, "dtype": torch.float16},
    "width 160": {"dim": 160},
    "width 224, all of it": {**EVERYTHING, "dim": 224, "group": 2},
    "width 192/128": {"dim": 192, "dim_v": 128, "group": 1},
    "width 192": {"dim": 192},
    "width 256": {"dim": 256, "group": 2},
    "width 256, window, soft cap": {"dim": 256, "group": 2, "window_left": 1023, "soft_cap": True},
    "window": {"window_left": 1023},
    "chunks": {"chunk_size": 8192},
    "both windows": {"window_left": 100, "window_right": 50, "causal": False},
    "alibi": {"alibi": True},
    "all of it": {**EVERYTHING},
    "tree": {"tree": True, "split": True},
    "tree, alibi": {"tree": True, "alibi": True},
    "beside decode": {"short": 2},
    "in parts": {"split": True},
    "in parts, beside decode": {"split": True, "short": 2},
    "in parts, width 64": {"split": True, "dim": 64},
    "in parts, width 80, beside decode": {"split": True, "dim": 80, "group": 1, "short": 8},
    "in parts, width 256": {"split": True, "dim": 256, "group": 2},
    "in parts, all of it": {**EVERYTHING, "split": True},
    "in parts, prefixes": {**PREFIXES},
    "in parts, prefixes, width 64": {**PREFIXES, "dim": 64, "group": 3, "num_kv_heads": 3, "lse": True},
    "in parts, prefixes, width 80": {**PREFIXES, "dim": 80},
    "in parts, prefixes, e4m3": {
        **PREFIXES,
        "kv_dtype": torch.float8_e4m3fn,
        "scales": True,
        "soft_cap": True,
    },
    "e4m3": {"kv_dtype": torch.float8_e4m3fn, "scales": True},
    "e4m3, for racecheck": {"kv_dtype": torch.float8_e4m3fn, "every_lane": True},
    "e4m3, fp16": {"kv_dtype": torch.float8_e4m3fn, "dtype": torch.float16},
    "e5m2, blocks of 8": {"kv_dtype": torch.float8_e5m2, "block_size": 8},
    "e4m3, width 64": {"kv_dtype": torch.float8_e4m3fn, "dim": 64, "scales": True},
    "e4m3, width 80": {"kv_dtype": torch.float8_e4m3fn, "dim": 80, "scales": True},
    "e4m3, width 96": {"kv_dtype": torch.float8_e4m3fn, "dim": 96, "scales": True},
    "e5m2, width 256": {"kv_dtype": torch.float8_e5m2, "dim": 256, "group": 2, "scales": True},
    "e4m3, width 192/128": {"kv_dtype": torch.float8_e4m3fn, "dim": 192, "dim_v": 128, "group": 1},
    "e4m3, beside decode": {"kv_dtype": torch.float8_e4m3fn, "scales": True, "short": 2},
    "e4m3, in parts": {"kv_dtype": torch.float8_e4m3fn, "scales": True, "split": True},
    "e4m3, all of it": {
        "kv_dtype": torch.float8_e4m3fn,
        "scales": True,
        **EVERYTHING,
        "split": True,
        "short": 2,
    },
    "e4m3 queries": {**FP8_QUERIES},
    "e4m3 queries, fp16, blocks of 128": {**FP8_QUERIES, "dtype": torch.float16, "block_size": 128},
    "e4m3 queries, blocks of 8, for racecheck": {**FP8_QUERIES, "block_size": 8, "every_lane": True},
    "e4m3 queries, width 64": {**FP8_QUERIES, "dim": 64},
    "e4m3 queries, width 256, window, soft cap": {
        **FP8_QUERIES,
        "dim": 256,
        "group": 2,
        "window_left": 1023,
        "soft_cap": True,
    },
    "e4m3 results": {"fp8_results": True},
    "e4m3 results, width 64, fp16": {"fp8_results": True, "dim": 64, "dtype": torch.float16},
    "e4m3 results, e4m3, width 96": {
        "fp8_results": True,
        "kv_dtype": torch.float8_e4m3fn,
        "dim": 96,
        "scales": True,
    },
    "e4m3 results, width 80": {"fp8_results": True, "dim": 80},
    "e4m3 results, e4m3 queries": {**FP8_QUERIES, "fp8_results": True},
    "e4m3 results, in parts, all of it": {**EVERYTHING, "fp8_results": True, "split": True, "short": 2},
    "e4m3 results, e4m3 queries, in parts": {**FP8_QUERIES, "fp8_results": True, "split": True},
    "e4m3 queries, in parts": {**FP8_QUERIES, "split": True},
    "e4m3 queries, in parts, all of it": {**FP8_QUERIES, **EVERYTHING, "split": True},
}


def config(**options: Any) -> Config:
    """The constants of a `specialisation` and of a `Mode`."""
    mode = {name: options.pop(name) for name in Mode._fields if name in options}
    return prefill.prefill_config(specialisation(**options), Mode(**mode))


@needs_nvcc
@pytest.mark.slow_cases(but_every=6)
@pytest.mark.parametrize("name", SHAPES)
def test_no_spills_and_no_serialised_products(tmp_path: Path, name: str) -> None:
    values = config(**SHAPES[name])
    _, report = compiled(tmp_path, "prefill.cu", values)
    check_no_spills(report)
    assert not re.findall(r"C75\d\d|serialized", report), report
    # at the start; then they are shared out
    at_start = {384: 168, 512: 128}[512 if values["WARPGROUPS"] == 3 else 384]
    assert registers(report) == at_start, report
    static = int(re.search(r"(\d+) bytes smem", report)[1])  # type: ignore[index]
    assert static + prefill.shared_bytes(values) <= 227 * 1024


@pytest.mark.slow_cases("e4m3 queries, in parts", "e4m3 queries, in parts, all of it")
@needs_nvcc
@pytest.mark.parametrize("name", [name for name in SHAPES if "in parts" in name])
def test_the_merge_kernel(tmp_path: Path, name: str) -> None:
    """No spills; it waits before it reads anything, and reads what the launch before wrote from L2."""
    values = config(**SHAPES[name])
    text, report = compiled(tmp_path, "prefill_merge.cu", values, "ptx")
    size = int(re.search(r"paged_prefill_merge_param_0\[(\d+)\]", text)[1])  # type: ignore[index]
    assert ctypes.sizeof(struct_of("prefill.cu")) == size
    steps = re.findall(r"griddepcontrol\.\w+|ld\.global\S*|st\.global", text)
    assert steps[:2] == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]
    assert "ld.global.cg.v4.f32" in steps
    assert {step for step in steps if step.startswith("ld.global")} <= {
        "ld.global.cg.s32",
        "ld.global.cg.v4.f32",
        *["ld.global.cg.f32"] * (values["SCALES"] or values["CASCADE"] or values["FP8_RESULTS"]),
        *["ld.global.nc.b16", "ld.global.nc.u16", "ld.global.b16", "ld.global.u16"] * values["SINKS"],
    }
    _, report = compiled(tmp_path, "prefill_merge.cu", values)
    check_no_spills(report)


def test_when_tiles_may_be_cut() -> None:
    """By shapes: few rows of queries, and room for keys, more of them than queries."""

    def may_split(
        num_tokens: int = 64,
        num_reqs: int = 1,
        short: int = 0,
        num_kv_heads: int = 8,
        steps: int = 256,
        max_query_len: int = 64,
    ) -> bool:
        q = torch.empty(num_tokens, num_kv_heads * 4, 128, dtype=torch.bfloat16)
        cache = torch.empty(1, 16, num_kv_heads, 128, dtype=torch.bfloat16)
        table, none = torch.empty(num_reqs, steps * 8, dtype=torch.int32), torch.empty(0)
        call = AttentionCall(
            q, cache, cache, table, none, none, q, None, max_query_len=max_query_len, scale=1.0
        )
        return prefill.may_split(call, Specialisation.of(call), short, 132)

    assert may_split()
    fp8_results = specialisation(fp8_results=True)
    q, cache = torch.empty(64, 32, 128), torch.empty(1, 16, 8, 128)
    table, none = torch.empty(1, 2048, dtype=torch.int32), torch.empty(0)
    call = AttentionCall(q, cache, cache, table, none, none, q, None, max_query_len=64, scale=1.0)
    assert not prefill.may_split(call, fp8_results, 0, 132), "its merge has not run on a GPU"
    for changed in ({"num_tokens": 513}, {"steps": 7}, {"num_kv_heads": 67}, {"num_reqs": 20}):
        assert not may_split(**changed), changed
    assert may_split(num_tokens=512)
    assert may_split(num_tokens=256, max_query_len=256, steps=8)
    assert may_split(num_tokens=512, max_query_len=512, steps=8), "half of the keys may be a context"
    assert not may_split(num_tokens=500, max_query_len=520, steps=8), "whole prompts"
    assert may_split(num_tokens=80, num_reqs=64, short=2)
    assert not may_split(num_tokens=200, num_reqs=64, short=2), "late CTAs serve them better"
    assert may_split(num_tokens=200, num_reqs=6, short=2), "chunks, of other lengths"
    assert may_split(num_tokens=432, num_reqs=54, max_query_len=8), "queries of decodes"
    assert not may_split(num_tokens=448, num_reqs=56, max_query_len=8)


@pytest.mark.parametrize(("num_tokens", "num_reqs", "tokens"), [(7, 3, 2), (8, 3, 3), (5, 9, 2), (9, 1, 4)])
def test_most_tiles_is_reached_and_never_passed(num_tokens: int, num_reqs: int, tokens: int) -> None:
    """Against every way to share the tokens out."""
    lengths = itertools.product(range(num_tokens + 1), repeat=min(num_reqs, 5))
    found = [sum(-(-n // tokens) for n in each) for each in lengths if sum(each) == num_tokens]
    assert max(found) == prefill.most_tiles(num_tokens, num_reqs, tokens)


def test_nothing_that_older_nvrtcs_take_for_a_host_function() -> None:
    """NVRTC 13.0 refuses generic lambdas and functions that are constexpr alone; nvcc and NVRTC 13.5
    do not."""
    assert not [
        name
        for name, text in jit.sources().items()
        if re.search(r"\[[&=]\] *\([^)]*\bauto\b|^constexpr [\w ]+\(", text, re.MULTILINE)
    ]


@pytest.mark.slow_cases(but=("llama",))
@needs_nvcc
@pytest.mark.skipif(NVDISASM is None, reason="nvdisasm is not installed")
@pytest.mark.parametrize(
    "name", ["llama", "width 64", "width 256", "window", "e4m3", "e4m3 queries", "in parts, prefixes"]
)
def test_exponentials_stand_between_the_scores_and_the_end_of_the_products(tmp_path: Path, name: str) -> None:
    """In every loop of steps: products, wait for the scores, all exponentials, wait for the rest. Nothing in
    the source alone holds them there. With fp8 queries one wait for all, in front of the exponentials."""
    assert NVDISASM
    values = config(**SHAPES[name])
    compiled(tmp_path, "prefill.cu", values)
    text = subprocess.run(
        [NVDISASM, "-c", str(tmp_path / "out.cubin")], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    kinds = {
        "HGMMA": "P",
        "QGMMA": "P",
        "MUFU.EX2": "E",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1": "1",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0": "0",
    }
    order = "".join(
        kind
        for line in text.splitlines()
        for start, kind in kinds.items()
        if re.search(rf"\*/\s+(@!?U?P\w+ )?{re.escape(start)}", line)
    )
    exponentials = values["TILE_KV"] // 2 + 2  # and of the two rows' factors
    if values["Q_FP8"]:  # scores, wait for them and for the values before, exponentials, values
        scores, weighted = "P" * (values["DIM"] // 32), "P" * (values["TILE_KV"] // 32)
        assert order.count(scores + "0" + "E" * exponentials + weighted) == 2, order
        return
    products = (values["DIM"] + values["TILE_KV"]) // 16
    steps = re.findall(r"P+1[^1]*?0", order)
    assert len(steps) == 2 + (values["WINDOW_LEFT"] >= 0), order
    assert steps == ["P" * products + "1" + "E" * exponentials + "0"] * len(steps), order


@needs_nvcc
def test_no_barrier_across_ctas_and_boxes_of_whole_blocks(tmp_path: Path) -> None:
    text, _ = compiled(tmp_path, "prefill.cu", config(), "ptx")
    assert "cp.async.bulk.tensor.4d" in text
    assert "membar" not in text
    size = int(re.search(r"paged_prefill_param_0\[(\d+)\]", text)[1])  # type: ignore[index]
    assert ctypes.sizeof(struct_of("prefill.cu")) == size, (
        "the launch copies as many bytes as the kernel declares"
    )
    assert "st.local" not in text
    assert "ld.local" not in text
    assert set(re.findall(r"wgmma\.mma_async\S+", text)) == {
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
    }


LAYOUTS: dict[str, Any] = {
    "slots": lambda blocks, slots, heads, dim: torch.empty(blocks, slots, heads, dim, dtype=torch.bfloat16),
    "heads first": lambda blocks, slots, heads, dim: torch.empty(
        blocks, heads, slots, dim, dtype=torch.bfloat16
    ).transpose(1, 2),
    "beside values": lambda blocks, slots, heads, dim: torch.empty(
        blocks, 2, slots, heads, dim, dtype=torch.bfloat16
    )[:, 0],
    "heads first, beside values": lambda blocks, slots, heads, dim: torch.empty(
        blocks, 2, heads, slots, dim, dtype=torch.bfloat16
    )[:, 0].transpose(1, 2),
    "wide slots": lambda blocks, slots, heads, dim: torch.empty(
        blocks, slots, heads * dim + 64, dtype=torch.bfloat16
    )[..., : heads * dim].unflatten(2, (heads, dim)),
    "one head": lambda blocks, slots, heads, dim: torch.empty(
        blocks, slots, heads, dim, dtype=torch.bfloat16
    )[:, :, :1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_boxes_fill_a_stage_in_the_order_of_the_descriptors(dim: int, block_size: int, layout: str) -> None:
    """What the copy engine writes for one block, address by address, against where the kernel's descriptors
    look for a token's column."""
    cache = LAYOUTS[layout](5, block_size, 3, dim)
    found = pool_box(tuple(cache.shape), cache.stride())
    assert found is not None
    width = found.box[0]
    assert width * 2 in (32, 64, 128)
    assert all(0 < edge <= 256 for edge in found.box)
    assert all(stride * 2 % 16 == 0 for stride in found.strides)
    head_square, head_group, block_group = found.where
    for head, block in ((cache.shape[2] - 1, 3), (0, 4), (cache.shape[2] - 1, 4)):
        begin, squares, written = (
            (0, 0, head * head_square, head * head_group + block * block_group),
            dim // width,
            0,
        )
        for w in range(found.box[3]):
            for z in range(found.box[2]):
                for y in range(found.box[1]):
                    place = [0, begin[1] + y, begin[2] + z, begin[3] + w]
                    assert all(0 <= at < size for at, size in zip(place, found.sizes, strict=True))
                    source = sum(at * stride for at, stride in zip(place[1:], found.strides, strict=True))
                    token, column = w * 8 + y, z * width
                    assert source == sum(
                        at * stride
                        for at, stride in zip((block, token, head, column), cache.stride(), strict=True)
                    )
                    assert (
                        written
                        == (token // 8 * squares + column // width) * width * 16 + token % 8 * width * 2
                    )
                    written += width * 2
        assert written == block_size * dim * 2
        outside = head * head_group + cache.shape[0] * block_group
        assert outside >= found.sizes[3], (
            "a block id that is one too large lies outside: the engine fills with zeros"
        )
    last = (
        sum((size - 1) * stride for size, stride in zip(found.sizes[1:], found.strides, strict=True)) + width
    )
    end = sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True)) + 1
    assert last <= end, "the map ends with the pool"


@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [
        (32, 32),
        (64, 64),
        (80, 80),
        (96, 96),
        (160, 160),
        (224, 224),
        (128, 128),
        (128, 64),
        (192, 128),
        (192, 192),
        (256, 256),
        (64, 256),
    ],
)
def test_a_cut_fits_shared_memory_with_what_is_read_and_what_is_filled(dim: int, dim_v: int) -> None:
    for wide in (True, False):
        shape = prefill.prefill_shape(dim, dim_v, wide)
        assert shape.k_stages >= 2
        assert shape.v_stages >= 2
        assert shape.q_stages in (1, 2)
    shape = prefill.prefill_shape_fp8(dim, dim_v)
    assert (shape.k_stages, shape.v_stages) == (2, 2)
    assert 2 <= shape.raw_stages <= 8
    fp8 = config(dim=dim, dim_v=dim_v, kv_dtype=torch.float8_e4m3fn)
    assert prefill.shared_bytes(fp8) <= 226 * 1024
    if (dim, dim_v) in prefill.FP8_QUERY_WIDTHS:
        queries = config(dim=dim, dim_v=dim_v, **FP8_QUERIES)
        assert prefill.shared_bytes(queries) <= 226 * 1024
        assert min(queries["K_STAGES"], queries["RAW_STAGES"]) >= 2
    values = config(dim=dim, dim_v=dim_v)
    assert prefill.shared_bytes(values) <= 226 * 1024


def test_what_it_leaves_to_triton() -> None:
    def refused(compute: tuple[int, int] = (9, 0), scale: float = 1.0, **spec: Any) -> str:
        return str(prefill.refuse(specialisation(**spec), compute, scale=scale))

    assert refused() == "None"
    for kv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert refused(kv_dtype=kv_dtype) == refused(kv_dtype=kv_dtype, dtype=torch.float16) == "None"
        narrow: dict[str, Any] = {"dim": 192, "dim_v": 128, "block_size": 128}
        # 64 keys in a step of fp8, 128 in one of 16 bits
        assert "block_size 128" in refused(kv_dtype=kv_dtype, **narrow)
        assert refused(**narrow) == "None"
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"compute": (8, 0)}, "compute capability 8.0"),
        ({"compute": (10, 0)}, "compute capability 10.0"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "dtypes"),
        ({"kv_dtype": torch.float16}, "dtypes"),
        ({"dim": 72}, "head_dim"),
        ({"dim_v": 144}, "head_dim"),
        ({"dim_v": 512}, "head_dim"),
        ({"block_size": 4}, "block_size 4"),
        ({"block_size": 24}, "block_size 24"),
        ({"block_size": 256}, "block_size"),
        ({"dim": 256, "block_size": 128}, "block_size 128"),
        ({"group": 129}, "129 query heads"),
        ({"scale": 0.0}, "scale 0.0"),
    )
    for changed, reason in changes:
        assert reason in refused(**changed), changed


def test_sinks_of_another_dtype_are_left_to_triton() -> None:
    x: Any = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16)
    call = AttentionCall(x[0], x, x, x, x, x, x[0], None, 1, 1.0, sinks=torch.zeros(8))
    assert "sinks of torch.float32" in str(refuse_sinks(call, specialisation()))
    assert refuse_sinks(call._replace(sinks=call.sinks.bfloat16()), specialisation()) is None
    assert refuse_sinks(call._replace(sinks=None), specialisation()) is None


def test_which_layouts_it_leaves_to_triton() -> None:
    def refused(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> str | None:
        none = torch.zeros(0, dtype=torch.int32)
        call = AttentionCall(q, k_cache, v_cache, none, none, none, out, None, max_query_len=1, scale=1.0)
        return refuse_layout(call)

    cache, q = torch.empty(4, 16, 8, 128, dtype=torch.bfloat16), torch.empty(5, 32, 128, dtype=torch.bfloat16)
    assert refused(q, cache, cache, q) is None
    assert refused(torch.empty(5, 48, 128, dtype=torch.bfloat16)[:, :32], cache, cache, q) is None
    for make in LAYOUTS.values():
        assert refused(q, make(4, 16, 8, 128), make(4, 16, 8, 128), q) is None
    padded_heads = torch.empty(4, 16, 8, 136, dtype=torch.bfloat16)[..., :128]
    overlapping = torch.empty(40000, dtype=torch.bfloat16).as_strided((4, 16, 8, 128), (1024, 1024, 128, 1))
    narrow = torch.empty(4, 16, 1, 24, dtype=torch.float8_e4m3fn)  # slots of 24 bytes
    assert "multiples of 16 bytes" in str(refused(q, narrow, narrow, q))
    fp8 = torch.empty(4, 16, 8, 128, dtype=torch.float8_e4m3fn)
    assert refused(q, fp8, fp8, q) is None
    for name, tensors in {
        "k_cache": (q, padded_heads, cache, q),
        "v_cache": (q, cache, overlapping, q),
        "q": (q.transpose(1, 2).contiguous().transpose(1, 2), cache, cache, q),
        "out": (q, cache, cache, torch.empty(5, 32, 132, dtype=torch.bfloat16)[..., :128]),
    }.items():
        assert str(refused(*tensors)).startswith(name), name


def test_a_pool_expanded_over_its_slots_is_seen_by_no_map() -> None:
    """It is left to the check, which refuses it by name."""
    assert pool_box((4, 16, 2, 64), (0, 0, 64, 1)) is None
    assert pool_box_of_latents((4, 16, 1, 576), (0, 0, 0, 1)) is None
