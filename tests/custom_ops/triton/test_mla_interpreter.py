"""Latent attention's Triton kernels in Triton's interpreter."""

from typing import Any

import pytest
import torch
from op_inputs.latent import (
    SELECTIONS,
    as_fp8,
    assert_latent_close,
    assert_sparse_close,
    latent_tensors,
    make_latent_batch,
    run_mla_attention,
    selected,
)

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, row_bytes, unpack
from torchpaged.custom_ops.mla.triton import config
from torchpaged.testing import BATCH_SPECS, BatchSpec

TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]


@pytest.mark.slow_cases(but=("torch.bfloat16-40-*",))
@pytest.mark.parametrize(
    ("rank", "rope", "num_heads", "block_size"),
    [(40, 6, 1, 1), (32, 16, 20, 64), (128, 32, 33, 16), (128, 32, 80, 16)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_shapes_and_dtypes(dtype: torch.dtype, rank: int, rope: int, num_heads: int, block_size: int) -> None:
    """Over all keys, and over positions in rows of a wider tensor."""
    sizes = {"num_heads": num_heads, "rank": rank, "rope": rope, "block_size": block_size}
    batch = make_latent_batch(BATCH_SPECS["mixed_padded"], dtype=dtype, **sizes)
    assert_latent_close(*run_mla_attention(TRITON, batch), batch)
    indices = selected(batch, "some", top_k=50)[:, 1:40]
    assert_sparse_close(*run_mla_attention(TRITON, batch, indices=indices), batch, indices)


@pytest.mark.slow_cases("mixed")
@pytest.mark.parametrize("query_lens", [(1, 1, 1, 1), (3, 0, 2, 9)], ids=["decode", "mixed"])
def test_parts_of_a_context_are_merged(query_lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of unlike lengths, some of which leave parts without keys, or all of them."""
    monkeypatch.setattr(config, "num_parts", lambda *_: 8)
    batch = make_latent_batch(
        BatchSpec("split", (200, 1, 0, 37), query_lens, padded_tokens=2), num_heads=4, rank=16, rope=8
    )
    assert_latent_close(*run_mla_attention(TRITON, batch), batch)


@pytest.mark.parametrize("parts", [1, 4])
def test_nan_and_inf_are_those_of_softmax(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query of NaN, one whose scores are +inf, one whose scores are all -inf; the others stay."""
    monkeypatch.setattr(config, "num_parts", lambda *_: parts)
    batch = make_latent_batch(BatchSpec("decode", (20,) * 3, (1,) * 3), num_heads=2, rank=16, rope=8)
    first = batch.q.abs()
    batch.k_cache.abs_()
    batch.q.copy_(first)
    batch.q[0, 0, 3] = float("nan")
    batch.q[1, 1] = float("inf")
    batch.q[2, 0] = -float("inf")
    out, lse = run_mla_attention(TRITON, batch)
    want, want_lse = run_mla_attention(REFERENCE, batch)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(lse.isnan(), want_lse.isnan())
    assert out[0, 0].isnan().all()
    assert out[1, 1].isnan().all()
    assert out[2, 0].isnan().all()
    assert torch.equal(lse == -float("inf"), want_lse == -float("inf"))
    assert lse[2, 0] == -float("inf")
    torch.testing.assert_close(out, want, equal_nan=True)


def test_requests_are_found_wherever_they_begin() -> None:
    """One long prompt among many short ones and empty ones: too many tiles per request to lay all out."""
    query_lens = (1, 0, 0, 40, 1, 1, 0, 5, 1)
    batch = make_latent_batch(
        BatchSpec("search", tuple(n + 3 if n else 0 for n in query_lens), query_lens, padded_tokens=1),
        num_heads=5,
        rank=16,
        rope=8,
    )
    assert_latent_close(*run_mla_attention(TRITON, batch), batch)


@pytest.mark.slow_cases(
    but=("*-mixed_padded-1-causal", "some-mixed_padded-1-*", "some-decode_edges-4-*", "tails-left_padded-*")
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("spec", ["decode_edges", "speculative", "chunked", "mixed_padded", "left_padded"])
@pytest.mark.parametrize("kind", SELECTIONS)
def test_selected_keys(kind: str, spec: str, parts: int, causal: bool, monkeypatch: Any) -> None:
    """More positions than a tile, in parts that may see none of them, or all in one."""
    monkeypatch.setattr(config, "num_parts", lambda *_: parts)
    batch = make_latent_batch(BATCH_SPECS[spec], num_heads=3, rank=16, rope=8, block_size=4)
    indices = selected(batch, kind, top_k=37)
    out, lse = run_mla_attention(TRITON, batch, indices=indices, causal=causal)
    assert_sparse_close(out, lse, batch, indices, causal)


@pytest.mark.slow_cases(but=("torch.bfloat16-40-*",))
@pytest.mark.parametrize(("rank", "rope", "num_heads"), [(40, 6, 1), (128, 32, 33), (320, 16, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_fp8(
    dtype: torch.dtype, rank: int, rope: int, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense and selected, whole and in parts; rows that begin at multiples of 4 bytes alone."""
    batch = as_fp8(
        make_latent_batch(
            BATCH_SPECS["mixed_padded"], num_heads=num_heads, rank=rank, rope=rope, dtype=dtype, block_size=4
        )
    )
    indices = selected(batch, "beyond", top_k=37)
    for parts in (1, 4):
        monkeypatch.setattr(config, "num_parts", lambda *_, parts=parts: parts)
        assert_latent_close(*run_mla_attention(TRITON, batch), batch)
        assert_sparse_close(*run_mla_attention(TRITON, batch, indices=indices), batch, indices)


@pytest.mark.parametrize("fp8", [False, True])
def test_nan_of_keys_that_are_not_selected(fp8: bool) -> None:
    """Between those that are; of rows of fp8 scales and rotated keys of NaN, too."""
    batch = make_latent_batch(BatchSpec("decode", (20, 7), (1, 1)), num_heads=2, rank=16, rope=8)
    batch = as_fp8(batch) if fp8 else batch
    indices = torch.tensor([[3, 7, 30], [3, 1, -1]], dtype=torch.int32)
    want, _ = run_mla_attention(REFERENCE, batch, indices=indices)
    size, pool, nan = batch.k_cache.shape[1], batch.k_cache, float("nan")
    pool, nan = (pool.view(torch.uint8), 0xFF) if fp8 else (pool, nan)
    for request, seen in enumerate(((3, 7), (1, 3))):
        for position in {*range((20, 7)[request])} - {*seen}:
            pool[int(batch.block_table[request, position // size]), position % size] = nan
    got, _ = run_mla_attention(TRITON, batch, indices=indices)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (200, 6)])
def test_write_rows_of_fp8(rank: int, rope: int) -> None:
    """Of numbers that e4m3 and bfloat16 hold: the interpreter rounds others its own way."""
    pool, want = (torch.zeros(5, 4, 1, row_bytes(rank, rope), dtype=torch.uint8) for _ in range(2))
    kv_c = torch.randint(-15, 16, (4, rank)) * torch.tensor([0.25, 1.0, 16.0, 0.0])[:, None]
    kv_c[:, ::128] = torch.tensor([28.0, 448.0, -3584.0, 0.0])[:, None]  # the largest: scales are powers of 2
    k_pe, slots = torch.randint(-99, 99, (4, rope)).float(), torch.tensor([7, -1, 19, 4])
    for ops, rows in ((TRITON, pool), (REFERENCE, want)):
        ops.write_latent(kv_c, k_pe, rows.view(ROW_DTYPE), slots)
    assert torch.equal(pool, want)
    exact = torch.cat((kv_c[2], k_pe[2]))
    assert torch.equal(unpack(pool.view(ROW_DTYPE)[4, 3, 0], rank, torch.float32), exact)
    assert int(pool.any(-1).sum()) == 3


@pytest.mark.parametrize("parts", [1, 4])
def test_output_scale(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of numbers that e4m3 holds, and of rows that see nothing: the interpreter rounds others its own way."""
    monkeypatch.setattr(config, "num_parts", lambda *_: parts)
    batch = make_latent_batch(BatchSpec("decode", (1, 0, 1), (1, 1, 1)), num_heads=2, rank=16, rope=8)
    batch.k_cache.copy_(torch.randint(-8, 9, batch.k_cache.shape))
    want, _ = run_mla_attention(REFERENCE, batch)
    for scale, indices in ((0.5, None), (2.0, torch.tensor([[0, -1], [0, 1], [3, 0]], dtype=torch.int32))):
        out = torch.full(want.shape, float("nan")).to(torch.float8_e4m3fn)
        options = {"max_query_len": 1, "scale": 0.1, "indices": indices, "output_scale": torch.tensor(scale)}
        TRITON.mla_attention(*latent_tensors(batch), out, **options)
        assert torch.equal(out.float() * scale, want)
    assert want.any()
