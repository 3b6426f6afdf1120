"""The CUDA C++ prefill kernel without a GPU: nvcc compiles its specialisations; no spills, no serialised products, the order that overlaps them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from torchpaged.custom_ops.cuda import jit, prefill

NVCC = shutil.which("nvcc")
SOURCE = Path(jit.__file__).parent / "prefill.cu"
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"group": 4},
    "llama, lse": {"group": 4, "lse": True},
    "no group": {"group": 1, "num_kv_heads": 32},
    "group of 7": {"group": 7, "num_kv_heads": 4},
    "width 64": {"dim": 64},
    "not causal": {"causal": False},
    "fp16, blocks of 128": {"dtype": torch.float16, "block_size": 128},
    "blocks of 8": {"block_size": 8},
    "cycles": {"clocks": True},
    "patience": {"patience": 1 << 20},
}


def macros(dtype: torch.dtype = torch.bfloat16, dim: int = 128, group: int = 4, num_kv_heads: int = 8, block_size: int = 16, causal: bool = True,
           lse: bool = False, **options: Any) -> dict[str, int]:  # fmt: skip
    return prefill.prefill_macros(dtype, dim, group, num_kv_heads, block_size, causal, lse, **options)


def compile_with_nvcc(tmp_path: Path, values: dict[str, int], kind: str) -> tuple[str, str]:
    """``(PTX or "", ptxas report)``."""
    assert NVCC
    target = tmp_path / f"prefill.{kind}"
    command = [NVCC, f"-{kind}", "-Xptxas", "-v", "-o", str(target), *jit.options(values, (9, 0)), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return target.read_text() if kind == "ptx" else "", done.stderr


@needs_nvcc
@pytest.mark.parametrize("name", SHAPES)
def test_no_spills_and_no_serialised_products(tmp_path: Path, name: str) -> None:
    values = macros(**SHAPES[name])
    _, report = compile_with_nvcc(tmp_path, values, "cubin")
    assert re.findall(r"(\d+) bytes spill stores", report) == ["0"], report
    assert not re.findall(r"C75\d\d|serialized", report), report
    assert int(re.search(r"Used (\d+) registers", report)[1]) == 168, report  # type: ignore[index]
    static = int(re.search(r"(\d+) bytes smem", report)[1])  # type: ignore[index]
    assert static + prefill.shared_bytes(values) <= 227 * 1024


def test_no_generic_lambdas() -> None:
    """NVRTC 13.0 takes the call operator of one for a host function; nvcc and NVRTC 13.5 do not."""
    assert not [name for name, text in jit.sources().items() if re.search(r"\[[&=]\] *\([^)]*\bauto\b", text)]


@needs_nvcc
def test_no_barrier_across_ctas_and_boxes_of_whole_blocks(tmp_path: Path) -> None:
    text, _ = compile_with_nvcc(tmp_path, macros(), "ptx")
    assert "cp.async.bulk.tensor.4d" in text and "membar" not in text
    assert "st.local" not in text and "ld.local" not in text
    assert set(re.findall(r"wgmma\.mma_async\S+", text)) == {"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"}


@pytest.mark.parametrize("dim", prefill.DIMS)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_boxes_fill_a_stage_in_the_order_of_the_descriptors(dim: int, block_size: int) -> None:
    """What the copy engine writes for one block, address by address, against where the kernel's descriptors look for a token's column."""
    heads, blocks, head, block = 3, 5, 2, 3
    sizes, strides, box = prefill.pool_box((blocks, block_size, heads, dim), heads * dim)
    assert box[0] * 2 == 128 and all(0 < edge <= 256 for edge in box) and all(stride * 2 % 16 == 0 for stride in strides)
    begin = (0, 0, head * (dim // 64), block * (block_size // 8))
    squares, written = dim // 64, 0
    for w in range(box[3]):
        for z in range(box[2]):
            for y in range(box[1]):
                place = [begin[0], begin[1] + y, begin[2] + z, begin[3] + w]
                assert all(0 <= at < size for at, size in zip(place, sizes, strict=True))
                source = place[1] * strides[0] + place[2] * strides[1] + place[3] * strides[2]
                token, column = w * 8 + y, z * 64
                assert source == ((block * block_size + token) * heads + head) * dim + column
                assert written == (token // 8 * squares + column // 64) * 1024 + token % 8 * 128
                written += 128
    assert written == block_size * dim * 2
    assert blocks * (block_size // 8) == sizes[3], "a block id that is one too large lies outside: the engine fills with zeros"


def test_what_it_leaves_to_triton() -> None:
    good: dict[str, Any] = {
        "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16, "dim": 128, "dim_v": 128, "group": 4, "block_size": 16, "compute": (9, 0),
    }  # fmt: skip
    assert prefill.refuse(**good) is None
    for changed, reason in (
        ({"compute": (8, 0)}, "compute capability 8.0"), ({"compute": (10, 0)}, "compute capability 10.0"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "dtypes"), ({"kv_dtype": torch.float8_e4m3fn}, "dtypes"), ({"dim": 96}, "head_dim"),
        ({"dim_v": 64}, "head_dim"), ({"block_size": 4}, "block_size 4"), ({"block_size": 24}, "block_size 24"), ({"block_size": 256}, "block_size"),
        ({"group": 129}, "129 query heads"), ({"scale": 0.0}, "scale 0.0"), ({"window": True}, "window"), ({"sinks": True}, "sinks"),
    ):  # fmt: skip
        assert reason in str(prefill.refuse(**{**good, **changed})), changed


def test_which_layouts_it_leaves_to_triton() -> None:
    cache, q = torch.empty(4, 16, 8, 128, dtype=torch.bfloat16), torch.empty(5, 32, 128, dtype=torch.bfloat16)
    assert prefill.refuse_layout(q, cache, cache, q) is None
    assert prefill.refuse_layout(torch.empty(5, 48, 128, dtype=torch.bfloat16)[:, :32], cache, cache, q) is None
    heads_first = torch.empty(4, 8, 16, 128, dtype=torch.bfloat16).transpose(1, 2)
    interleaved = torch.empty(4, 2, 16, 8, 128, dtype=torch.bfloat16)[:, 0]
    for name, tensors in {
        "k_cache": (q, heads_first, cache, q), "v_cache": (q, cache, interleaved, q), "q": (q.transpose(1, 2).contiguous().transpose(1, 2), cache, cache, q),
        "out": (q, cache, cache, torch.empty(5, 32, 132, dtype=torch.bfloat16)[..., :128]),
    }.items():  # fmt: skip
        assert str(prefill.refuse_layout(*tensors)).startswith(name), name
