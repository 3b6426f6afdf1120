"""The CUDA C++ kernels of sparse latent attention and of its indexer on Hopper: oracles over heads, blocks
and lengths, the same bits every time, one capture for other lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from op_inputs.indexer import exact_logits, make_index_batch, run_index_logits, weights_of
from op_inputs.latent import (
    SELECTIONS,
    assert_sparse_close,
    latent_tensors,
    make_latent_batch,
    run_mla_attention,
    selected,
)
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.cuda import jit
from torchpaged.custom_ops.indexer.call import IndexCall
from torchpaged.custom_ops.indexer.cuda import index_logits, top_k_indices
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda import selected as sparse
from torchpaged.testing import BATCH_SPECS, BatchSpec

pytestmark = pytest.mark.gpu
CUDA, REFERENCE = BACKEND_OPS["cuda"], BACKEND_OPS["reference"]
SPECS = {
    **{
        name: BATCH_SPECS[name]
        for name in ("decode_edges", "decode_padded", "speculative", "left_padded_chunk")
    },
    "long": BatchSpec("long", (5000, 3, 0, 700), (1, 1, 1, 1), padded_tokens=2),
    "many": BatchSpec("many", tuple(37 * i % 900 for i in range(80)), (1,) * 80),
}


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHPAGED_CUDA_SPARSE", "1")
    if torch.cuda.get_device_capability() != (9, 0) or jit.unavailable() is not None:
        pytest.skip("the kernels run on Hopper")


@pytest.mark.parametrize("kind", SELECTIONS)
@pytest.mark.parametrize(("num_heads", "block_size"), [(16, 64), (5, 16), (64, 64), (128, 32)])
def test_selected(num_heads: int, block_size: int, kind: str) -> None:
    """Few positions, and so many that a cluster shares them."""
    for number, spec in enumerate(SPECS.values()):
        options: dict[str, Any] = {"causal": number % 3 != 2}
        dtype = torch.float16 if number % 2 else torch.bfloat16
        batch = make_latent_batch(
            spec, num_heads=num_heads, rank=512, rope=64, dtype=dtype, device="cuda", block_size=block_size
        )
        for top_k in (11, 2048):
            options["indices"] = selected(batch, kind, top_k)
            out, lse = run_mla_attention(CUDA, batch, **options)
            call = LatentCall(*latent_tensors(batch), out, lse, batch.max_query_len, batch.scale, **options)
            assert sparse.why_not(call, (9, 0)) is None
            assert_sparse_close(out, lse, batch, **options)
            again, lse_again = run_mla_attention(CUDA, batch, **options)
            assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(("num_heads", "block_size"), [(64, 64), (20, 16), (32, 128)])
def test_logits(num_heads: int, block_size: int, fp8: bool) -> None:
    for number, spec in enumerate(SPECS.values()):
        sizes = {"width": 128, "num_heads": num_heads, "block_size": block_size}
        batch = make_index_batch(spec, **sizes, dtype=torch.bfloat16, device="cuda")
        options: dict[str, Any] = {"causal": number % 3 != 2}
        if fp8:
            batch = replace(batch, k_cache=batch.k_cache.to(torch.float8_e4m3fn))
            options["k_scale"] = torch.rand(batch.k_cache.shape[:2], device="cuda") + 0.5
        got = run_index_logits(CUDA, batch, **options)
        tensors = batch.k_cache, batch.block_table, batch.seq_lens, batch.query_start_loc
        call = IndexCall(batch.q, weights_of(batch), *tensors, got, batch.max_query_len, **options)
        assert index_logits.why_not(call, (9, 0)) is None
        want = exact_logits(batch, **options)
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-3)
        assert torch.equal(got, run_index_logits(CUDA, batch, **options))


def test_a_nan_of_e4m3_is_seen() -> None:
    """The kernel's conversion takes its bits for 480."""
    batch = make_index_batch(
        BatchSpec("nan", (300,), (1,)),
        width=128,
        num_heads=64,
        block_size=64,
        dtype=torch.bfloat16,
        device="cuda",
    )
    keys = batch.k_cache.nan_to_num(0.0).to(torch.float8_e4m3fn)
    for position, column, bits in ((3, 77, 0x7F), (259, 0, 0xFF)):
        block = int(batch.block_table[0, position // 64])
        keys.view(torch.uint8)[block, position % 64, 0, column] = bits
    scales = torch.ones(keys.shape[:2], device="cuda")
    got = run_index_logits(CUDA, replace(batch, k_cache=keys), k_scale=scales)
    assert got.isnan().nonzero()[:, 1].tolist() == [3, 259]


def rows_of_logits(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(rows, columns, generator=generator)
    for row, values in enumerate(logits):
        if row % 6 == 1:
            values[::3] = float("-inf")
        elif row % 6 == 2:
            values.round_()  # most are equal
        elif row % 6 == 3:
            values[columns // 30 :] = float("-inf")
        elif row % 6 == 4:
            values[5:9] = torch.tensor([float("nan"), float("inf"), -float("nan"), -0.0])
        elif row % 6 == 5:
            values.sign_().mul_(0.0)
    return logits.cuda()


@pytest.mark.parametrize(("rows", "columns"), [(6, 40), (6, 5000), (12, 131072), (64, 8192), (200, 20000)])
def test_top_k(rows: int, columns: int) -> None:
    """Those of the reference, of equal ones the first, in ascending order."""
    logits = rows_of_logits(rows, columns)
    for top_k in (1, 512, 2048):
        got, want = (torch.full((rows, top_k), -7, dtype=torch.int32, device="cuda") for _ in range(2))
        assert top_k_indices.why_not(logits, got, (9, 0)) is None
        CUDA.top_k_indices(logits, got)
        REFERENCE.top_k_indices(logits, want)
        behind = torch.iinfo(torch.int32).max
        assert torch.equal(got, got.where(got >= 0, behind).sort(1).values.where(got >= 0, -1))
        assert torch.equal(got, want.where(want >= 0, behind).sort(1).values.where(got >= 0, -1))
        assert torch.equal(got >= 0, (want >= 0).sort(1, descending=True).values)


def test_one_capture_serves_other_lengths() -> None:
    """Logits, the best positions, and attention to them, in one graph."""
    longest = BatchSpec("longest", (1500,) * 3, (1,) * 3)
    latents = make_latent_batch(
        longest, num_heads=16, rank=512, rope=64, dtype=torch.bfloat16, device="cuda", block_size=64
    )
    keys = make_index_batch(
        longest, width=128, num_heads=64, block_size=64, dtype=torch.bfloat16, device="cuda"
    )

    def step() -> tuple[Tensor, ...]:
        logits = run_index_logits(CUDA, keys)
        indices = torch.empty(3, 100, dtype=torch.int32, device="cuda")
        CUDA.top_k_indices(logits, indices)
        return logits, indices, *run_mla_attention(CUDA, latents, indices=indices)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, indices, out, lse = step()
    for seq_lens in ((1500, 3, 700), (0, 129, 1), (1, 1, 0)):
        for batch in (latents, keys):
            batch.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        graph.replay()
        torch.testing.assert_close(logits.cpu().double(), exact_logits(keys), rtol=1e-4, atol=1e-3)
        want = torch.empty_like(indices)
        REFERENCE.top_k_indices(logits, want)
        assert torch.equal(indices.sort(1).values, want.sort(1).values)
        assert_sparse_close(out, lse, latents, indices)
