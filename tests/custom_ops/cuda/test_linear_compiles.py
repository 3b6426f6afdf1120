"""The CUDA C++ linear kernels without a GPU: nvcc compiles their specialisations; no spills, 16-byte copies,
shared memory that fits."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from cuda_sources import check_no_spills, compiled, needs_nvcc, registers
from specialisations import SHARED_MEMORY

from torchpaged.custom_ops.cuda.config import Config
from torchpaged.custom_ops.layers.cuda.linear_large import large_config, large_shape, sum_config
from torchpaged.custom_ops.layers.cuda.linear_shape import (
    LinearShape,
    LinearSpec,
    linear_config,
    linear_shape,
    norm_config,
    norm_is_fused,
    token_bucket,
)

#: (out_features, in_features, activation, norm, residual, dtype)
LAYERS = {
    "8b qkv": (6144, 4096, "none", True, False, torch.bfloat16),
    "8b o": (4096, 4096, "none", False, True, torch.bfloat16),
    "8b gate_up": (28672, 4096, "silu", True, False, torch.bfloat16),
    "8b down": (4096, 14336, "none", False, True, torch.bfloat16),
    "1b down": (2048, 8192, "none", False, True, torch.bfloat16),
    "qwen3.5 in": (8224, 1024, "none", True, False, torch.bfloat16),
    "qwen3.5 out": (1024, 2048, "none", False, True, torch.bfloat16),
    "v2-lite o": (2048, 2048, "none", False, True, torch.bfloat16),
    "odd": (1002, 1032, "gelu", True, True, torch.float16),
}


def specialised(name: str, tokens: int, capability: tuple[int, int]) -> tuple[str, Config, LinearShape]:
    """File, constants and shape."""
    n, k, activation, norm, residual, dtype = LAYERS[name]
    bucket, recent = token_bucket(tokens), capability >= (9, 0)
    shape = linear_shape(bucket, n, k, 132, capability == (9, 0), recent, *SHARED_MEMORY[capability])
    norm = norm and norm_is_fused(shape, dtype, dtype)
    odd = name == "odd"
    spec = LinearSpec(
        dtype, bucket, n, k, k, activation, norm, odd, not name.endswith(" o"), residual, not odd
    )
    return "linear_wide" if shape.wide else "linear", linear_config(spec, shape, early=recent), shape


def check_report(report: str, threads: int, ctas_per_sm: int, may_serialise: bool = False) -> None:
    """No spills, registers for the CTAs that are to be resident, and nothing that puts the warpgroup products
    one behind the other, unless ``may_serialise``."""
    check_no_spills(report)
    assert registers(report) * threads * ctas_per_sm <= 65536, (report, threads)
    assert may_serialise or "serialized" not in report, report


@pytest.mark.slow_cases(but=("8b gate_up-*", "v2-lite o-1"))
@needs_nvcc
@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("name", LAYERS)
def test_compiles_for_sm_90(tmp_path: Path, name: str, tokens: int) -> None:
    file, values, shape = specialised(name, tokens, (9, 0))
    _, report = compiled(tmp_path, f"{file}.cu", values)
    # With 16 tokens ptxas puts a chunk's four products one behind the other. To end them before the next
    # chunk is awaited avoids that, and is 3 % slower (docs/log/first_token.md).
    check_report(report, shape.threads, shape.ctas_per_sm, may_serialise=tokens == 16)
    if (name, tokens) == ("v2-lite o", 1):  # two and a CTA of 128 threads of the kernel ahead fit
        assert 2 * shape.threads * registers(report) + 128 * 64 <= 65536, report


@pytest.mark.slow_cases(but=("odd-64-(8, 0)",))
@needs_nvcc
@pytest.mark.parametrize("capability", [(8, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("tokens", [2, 64])
@pytest.mark.parametrize("name", ["8b gate_up", "odd"])
def test_compiles_for_others(tmp_path: Path, name: str, tokens: int, capability: tuple[int, int]) -> None:
    file, values, shape = specialised(name, tokens, capability)
    assert file == "linear"
    _, report = compiled(tmp_path, f"{file}.cu", values, "cubin", capability)
    check_report(report, shape.threads, 1)


@pytest.mark.slow_cases(but=("8b down-176",))
@needs_nvcc
@pytest.mark.parametrize("tokens", [80, 128, 176, 192, 256])
@pytest.mark.parametrize("name", ["8b gate_up", "8b down", "1b down"])
def test_large_products_compile(tmp_path: Path, name: str, tokens: int) -> None:
    n, k, activation, _, residual, dtype = LAYERS[name]
    shape = large_shape(tokens, n, k, 132)
    if shape is None:
        assert (name, tokens) == ("8b gate_up", 256)
        return
    spec = LinearSpec(dtype, 128, n, k, k, activation, False, False, False, residual, True)
    _, report = compiled(tmp_path, "linear_large.cu", large_config(spec, shape, early=True))
    assert "serialized" not in report, report
    threads = -(-shape.threads // 128) * 128  # registers are shared out by four warps
    assert registers(report) * threads <= 65536, report
    assert shape.shared_bytes + 1024 <= SHARED_MEMORY[9, 0][1]
    if shape.row_tiles == 1:  # of two tiles, the end may spill a few
        check_no_spills(report)
    if shape.k_parts > 1:
        _, report = compiled(tmp_path, "linear_sum.cu", sum_config(spec, shape, early=True))
        check_no_spills(report)


@needs_nvcc
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norm_compiles(tmp_path: Path, weight_dtype: torch.dtype) -> None:
    _, report = compiled(tmp_path, "norm.cu", norm_config(torch.bfloat16, weight_dtype, 14336, True))
    check_report(report, 256, 1)


@needs_nvcc
def test_weights_are_asked_for_before_the_wait(tmp_path: Path) -> None:
    file, values, _ = specialised("8b o", 4, (9, 0))
    text, _ = compiled(tmp_path, f"{file}.cu", values, "ptx")
    before, after = text.split("griddepcontrol.wait")
    copies = re.findall(
        r"cp\.async\.\w+\.shared\.global(?:\.L2::cache_hint)? \[[^\]]+\], \[[^\]]+\], (\d+)", before
    )
    assert copies, copies
    assert set(copies) == {"16"}, copies
    assert "griddepcontrol.launch_dependents" in before
    assert "mma.sync.aligned.m16n8k16" in after
    file, values, _ = specialised("8b o", 64, (9, 0))
    text, _ = compiled(tmp_path, f"{file}.cu", values, "ptx")
    before, after = text.split("griddepcontrol.wait")
    assert "cp.async.bulk.tensor.2d" in before
    assert "wgmma.mma_async" in after


@needs_nvcc
def test_parts_are_sent_to_who_finishes_them(tmp_path: Path) -> None:
    file, values, shape = specialised("1b down", 32, (9, 0))
    assert shape.cluster > 1
    text, _ = compiled(tmp_path, f"{file}.cu", values, "ptx")
    before, after = text.split("wgmma.wait_group.sync.aligned 0")
    assert "st.async.shared::cluster" in after
    assert "barrier.cluster.arrive" in before
    assert not re.findall(r"barrier\.cluster|bar\.sync|ld\.shared::cluster", after), (
        "after the products no CTA waits for a whole cluster"
    )


@pytest.mark.parametrize("capability", SHARED_MEMORY, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 64])
def test_shared_memory_and_grid_fit(tokens: int, capability: tuple[int, int]) -> None:
    bucket, (per_sm, per_cta) = token_bucket(tokens), SHARED_MEMORY[capability]
    hopper, recent = capability == (9, 0), capability >= (9, 0)
    for sms, n, k in itertools.product(
        (20, 76, 84, 108, 128, 132, 148),
        (8, 576, 2048, 4096, 6144, 28672, 128256),
        (8, 576, 2048, 4096, 14336),
    ):
        shape = linear_shape(bucket, n, k, sms, hopper, recent, per_sm, per_cta)
        assert shape.shared_bytes(bucket, True) + 2048 <= per_cta, (sms, n, k, shape)
        assert shape.grid(n) % shape.cluster == 0
        assert shape.grid(n) // shape.cluster * shape.rows >= n
        assert shape.cluster == 1 or recent
        if shape.wide:  # room for as many as the shape was chosen for
            assert shape.ctas_per_sm * (shape.shared_bytes(bucket, False) + 2048) <= per_sm, (sms, n, k)
            assert 1 <= shape.early_stages <= shape.stages
