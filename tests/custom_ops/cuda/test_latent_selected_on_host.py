"""The CUDA C++ kernel of sparse latent attention for many heads on the host (latent_on_host.h): its own
sources, launched by its own launcher, against the oracle."""

import functools
from pathlib import Path
from typing import Any

import kernels_on_host
import pytest
import torch
from cuda_sources import needs_gxx
from kernels_on_host import HostKernel, assert_no_races
from op_inputs.latent import as_fp8, assert_sparse_close, latent_tensors, make_latent_batch, of_size, selected

from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda import latent_selected
from torchpaged.custom_ops.mla.cuda import selected as selected_kernel
from torchpaged.custom_ops.mla.cuda.shape import LatentSpec, latent_config
from torchpaged.testing import BatchSpec

pytestmark = needs_gxx
CASES: dict[str, tuple[dict[str, Any], BatchSpec, str, int]] = {
    "64 heads": ({}, BatchSpec("a", (500, 3, 0), (1, 1, 1), padded_tokens=1), "some", 300),
    "40 heads, drafts": (
        {"num_heads": 40, "block_size": 16},
        BatchSpec("b", (190, 8), (3, 2)),
        "beyond",
        150,
    ),
    "100 heads": ({"num_heads": 100, "dtype": torch.float16}, BatchSpec("c", (300,), (1,)), "twice", 200),
    "none": ({}, BatchSpec("d", (70, 30), (1, 1)), "none", 70),
    "fp8": ({"fp8": True}, BatchSpec("f", (300, 5), (1, 2), padded_tokens=1), "some", 250),
    "fp8, 100 heads": (
        {"fp8": True, "num_heads": 100, "block_size": 16},
        BatchSpec("g", (300, 5), (1, 2), padded_tokens=1),
        "all",
        200,
    ),
    "in turns": ({"num_sms": 132}, BatchSpec("h", (500, 3, 0), (1, 1, 1), padded_tokens=1), "some", 300),
    "fp8, in turns": (
        {"fp8": True, "num_heads": 100, "num_sms": 132},
        BatchSpec("i", (300, 5), (1, 2)),
        "beyond",
        200,
    ),
    "in turns, large": ({"num_sms": 132, "power": 90}, BatchSpec("j", (200,), (1,)), "some", 150),
    "one tile": ({"num_heads": 33, "block_size": 32}, BatchSpec("e", (64,), (1,)), "all", 64),
}


@pytest.mark.slow_cases(but=("40 heads, drafts",))
@pytest.mark.parametrize("name", CASES)
def test_matches_the_oracle(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, in other orders of the threads: the same bits."""
    options, batch_spec, kind, top_k = CASES[name]
    options = {"num_heads": 64, "dtype": torch.bfloat16, "block_size": 64} | options
    fp8, num_sms, power = options.pop("fp8", False), options.pop("num_sms", 1), options.pop("power", 0)
    batch = of_size(make_latent_batch(batch_spec, rank=512, rope=64, **options), power)
    batch = as_fp8(batch) if fp8 else batch
    indices = selected(batch, kind, top_k)
    shapes, results = (*batch.q.shape[:2], batch.v_cache.shape[-1]), []

    @functools.cache
    def specialised(_: int, spec: LatentSpec) -> tuple[HostKernel, int]:
        replaced = ("bulk.cuh", "wgmma.cuh", "latent_instructions.cuh")
        named = "latent_selected.cu", "latent_selected", latent_config(spec), "latent_on_host.h"
        return HostKernel(
            kernels_on_host.compiled(tmp_path / "k", *named, replaced), spec.cluster
        ), latent_selected.threads_of(spec)

    monkeypatch.setattr(latent_selected, "_specialised", specialised)
    for least in ("MIN_CTAS", "MIN_FP8_CTAS"):
        monkeypatch.setattr(latent_selected, least, 1)
    monkeypatch.setattr(gpu, "launches_early", lambda _: True)
    monkeypatch.setattr(gpu, "num_sms", lambda _: num_sms)  # for two CTAs of a tile of rows, or not
    for _ in range(2):
        out = torch.full(shapes, float("nan"), dtype=batch.q.dtype)
        lse = torch.full(shapes[:2], float("nan"))
        call = LatentCall(*latent_tensors(batch), out, lse, batch.max_query_len, batch.scale, True, indices)
        assert (selected_kernel.why_none(call, (9, 0)) or latent_selected.why_not(call)) is None
        latent_selected.attend(call)
        assert_sparse_close(out, lse, batch, indices)
        results.append((out, lse))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["64 heads", "fp8", "fp8, in turns"])
def test_no_races(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are used again. Lengths are read before the kernels ahead have ended."""
    assert_no_races(("seq_lens", "starts"), test_matches_the_oracle, name, tmp_path, monkeypatch)
