"""The CUDA C++ linear kernels without a GPU: nvcc compiles their specialisations; no spills, 16-byte copies,
shared memory that fits."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from torchpaged.custom_ops.cuda import jit
from torchpaged.custom_ops.cuda.config import Config
from torchpaged.custom_ops.layers.cuda.linear_shape import (
    LinearShape,
    linear_config,
    linear_shape,
    norm_config,
    norm_is_fused,
    token_bucket,
)

NVCC = shutil.which("nvcc")
SHARED = {(8, 0): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}  # bytes that one CTA may have
PER_SM = {capability: size + 1024 for capability, size in SHARED.items()}
#: (out_features, in_features, activation, norm, residual, dtype)
LAYERS = {
    "8b qkv": (6144, 4096, "none", True, False, torch.bfloat16),
    "8b o": (4096, 4096, "none", False, True, torch.bfloat16),
    "8b gate_up": (28672, 4096, "silu", True, False, torch.bfloat16),
    "1b down": (2048, 8192, "none", False, True, torch.bfloat16),
    "odd": (1002, 1032, "gelu", True, True, torch.float16),
}
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")


def specialised(name: str, tokens: int, capability: tuple[int, int]) -> tuple[str, Config, LinearShape]:
    """File, constants and shape."""
    n, k, activation, norm, residual, dtype = LAYERS[name]
    bucket, recent = token_bucket(tokens), capability >= (9, 0)
    shape = linear_shape(
        bucket, n, k, 132, capability == (9, 0), recent, PER_SM[capability], SHARED[capability]
    )
    norm = norm and norm_is_fused(shape, dtype, dtype)
    config = linear_config(
        dtype, bucket, n, k, k, activation, norm, name == "odd", residual, n % 8 == 0, recent, shape
    )
    return "linear_wide" if shape.wide else "linear", config, shape


def compile_with_nvcc(
    tmp_path: Path, file: str, values: Config, capability: tuple[int, int], kind: str = "cubin"
) -> tuple[str, str]:
    """``(PTX or "", ptxas report)``."""
    assert NVCC
    target = tmp_path / f"out.{kind}"
    command = [
        NVCC,
        f"-{kind}",
        "-Xptxas",
        "-v",
        "-Werror",
        "all-warnings",
        "-o",
        str(target),
        *jit.options(values, capability),
        str(jit.write_sources(tmp_path, f"{file}.cu", values)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return target.read_text() if kind == "ptx" else "", done.stderr


def check_report(report: str, threads: int, ctas_per_sm: int) -> None:
    """No spills, registers for the CTAs that are to be resident, and nothing that puts the warpgroup products
    one behind the other."""
    assert re.findall(r"(\d+) bytes spill stores", report) == ["0"], report
    registers = int(re.search(r"Used (\d+) registers", report)[1])  # type: ignore[index]
    assert registers * threads * ctas_per_sm <= 65536, (registers, threads)
    assert "serialized" not in report, report


@needs_nvcc
@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("name", LAYERS)
def test_compiles_for_sm_90(tmp_path: Path, name: str, tokens: int) -> None:
    file, values, shape = specialised(name, tokens, (9, 0))
    _, report = compile_with_nvcc(tmp_path, file, values, (9, 0))
    check_report(report, shape.threads, shape.ctas_per_sm)


@needs_nvcc
@pytest.mark.parametrize("capability", [(8, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("tokens", [2, 64])
@pytest.mark.parametrize("name", ["8b gate_up", "odd"])
def test_compiles_for_others(tmp_path: Path, name: str, tokens: int, capability: tuple[int, int]) -> None:
    file, values, shape = specialised(name, tokens, capability)
    assert file == "linear"
    _, report = compile_with_nvcc(tmp_path, file, values, capability)
    check_report(report, shape.threads, 1)


@needs_nvcc
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norm_compiles(tmp_path: Path, weight_dtype: torch.dtype) -> None:
    _, report = compile_with_nvcc(
        tmp_path, "norm", norm_config(torch.bfloat16, weight_dtype, 14336, True), (9, 0)
    )
    check_report(report, 256, 1)


@needs_nvcc
def test_weights_are_asked_for_before_the_wait(tmp_path: Path) -> None:
    file, values, _ = specialised("8b o", 4, (9, 0))
    text, _ = compile_with_nvcc(tmp_path, file, values, (9, 0), "ptx")
    before, after = text.split("griddepcontrol.wait")
    copies = re.findall(
        r"cp\.async\.\w+\.shared\.global(?:\.L2::cache_hint)? \[[^\]]+\], \[[^\]]+\], (\d+)", before
    )
    assert copies and set(copies) == {"16"}, copies
    assert "griddepcontrol.launch_dependents" in before and "mma.sync.aligned.m16n8k16" in after
    file, values, _ = specialised("8b o", 64, (9, 0))
    text, _ = compile_with_nvcc(tmp_path, file, values, (9, 0), "ptx")
    before, after = text.split("griddepcontrol.wait")
    assert "cp.async.bulk.tensor.2d" in before and "wgmma.mma_async" in after


@needs_nvcc
def test_parts_are_sent_to_who_finishes_them(tmp_path: Path) -> None:
    file, values, shape = specialised("1b down", 32, (9, 0))
    assert shape.cluster > 1
    text, _ = compile_with_nvcc(tmp_path, file, values, (9, 0), "ptx")
    before, after = text.split("wgmma.wait_group.sync.aligned 0")
    assert "st.async.shared::cluster" in after and "barrier.cluster.arrive" in before
    assert not re.findall(r"barrier\.cluster|bar\.sync|ld\.shared::cluster", after), (
        "after the products nobody waits for a whole cluster"
    )


@pytest.mark.parametrize("capability", SHARED, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 16, 17, 32, 33, 64])
def test_shared_memory_and_grid_fit(tokens: int, capability: tuple[int, int]) -> None:
    for n in (8, 576, 2048, 6144, 28672, 128256):
        for k in (8, 576, 2048, 14336):
            sizes = PER_SM[capability], SHARED[capability]
            shape = linear_shape(
                token_bucket(tokens), n, k, 132, capability == (9, 0), capability >= (9, 0), *sizes
            )
            assert shape.shared_bytes(token_bucket(tokens), True) + 2048 <= SHARED[capability], shape
            assert shape.grid(n) % shape.cluster == 0 and shape.grid(n) // shape.cluster * shape.rows >= n
            assert shape.cluster == 1 or capability >= (9, 0)
            if shape.wide:  # room for as many as the shape was chosen for
                assert (
                    shape.ctas_per_sm * (shape.shared_bytes(token_bucket(tokens), False) + 2048) <= 228 * 1024
                ), shape
                assert 1 <= shape.early_stages <= shape.stages
