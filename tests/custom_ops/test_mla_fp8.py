"""Latents in rows of fp8 on a CPU: the row's bytes, the oracle, what is refused, and who takes them."""

import struct
from typing import Any

import pytest
import torch
from kernels import Kernels, over
from op_inputs.latent import (
    as_fp8,
    assert_latent_close,
    assert_sparse_close,
    latent_tensors,
    make_latent_batch,
    run_mla_attention,
    selected,
)
from torch import Tensor

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, row_bytes, unpack
from torchpaged.testing import BATCH_SPECS

CPU, REFERENCE = BACKEND_OPS["cpu"], BACKEND_OPS["reference"]


def zeros(*sizes: int) -> Tensor:
    return torch.zeros(*sizes, dtype=torch.uint8).view(ROW_DTYPE)


@over("cpu", "reference", spec=BATCH_SPECS)
def test_matches_the_oracle(on: Kernels, spec: str) -> None:
    sizes: dict[str, Any] = {"rank": 24, "rope": 8, "block_size": 4}
    if on.device == "cuda":
        if torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("fp8 needs compute capability 8.9")
        sizes = {"rank": 64, "rope": 16, "dtype": torch.bfloat16, "device": "cuda"}
    batch = as_fp8(make_latent_batch(BATCH_SPECS[spec], **sizes))
    indices = selected(batch, "beyond")
    for causal in (True, False):
        out, lse = run_mla_attention(on.ops, batch, causal=causal)
        assert_latent_close(out, lse, batch, causal=causal)
        out, lse = run_mla_attention(on.ops, batch, causal=causal, indices=indices)
        assert_sparse_close(out, lse, batch, indices, causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_deepseeks_width(dtype: torch.dtype) -> None:
    batch = as_fp8(
        make_latent_batch(BATCH_SPECS["mixed_small"], num_heads=16, rank=512, rope=64, dtype=dtype)
    )
    assert batch.k_cache.shape[-1] == 656
    for ops in (CPU, REFERENCE):
        assert_latent_close(*run_mla_attention(ops, batch), batch)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_bytes_of_a_row(backend: str) -> None:
    """e4m3 numbers, one float32 scale for each 128 of them, the rotated key in bfloat16; nothing else of the
    pool is touched."""
    pool = torch.full((4, 4, 1, 656), 7, dtype=torch.uint8)
    kv_c, k_pe = torch.randn(3, 512) * torch.arange(1, 5).repeat_interleave(128), torch.randn(3, 64)
    kv_c[2, 128:256] = 0.0
    BACKEND_OPS[backend].write_latent(kv_c, k_pe, pool.view(ROW_DTYPE), torch.tensor([14, -1, 5]))
    for token, (block, slot) in ((0, (3, 2)), (2, (1, 1))):
        row = bytes(pool[block, slot, 0].tolist())
        scales = torch.tensor(struct.unpack("<4f", row[512:528]))
        top = kv_c[token].view(4, 128).abs().amax(1)
        assert torch.equal(scales, torch.where(top == 0, 1.0, top / torch.tensor([448.0])))
        assert row[528:] == bytes(k_pe[token].bfloat16().view(torch.uint8).tolist())
        numbers = pool[block, slot, 0, :512].view(ROW_DTYPE).float() * scales.repeat_interleave(128)
        assert ((numbers - kv_c[token]).abs() <= kv_c[token].abs() / 16 + scales.max() * 2**-10).all()
    assert int((pool != 7).any(-1).sum()) == 2
    before = pool.clone()
    for count in (0, 1):  # of tokens, none of which is written
        slots = torch.full((count,), -1)
        BACKEND_OPS[backend].write_latent(kv_c[:count], k_pe[:count], pool.view(ROW_DTYPE), slots)
    assert torch.equal(pool, before)


@over("reference", "triton", gpu=())
def test_nan_and_infinity_are_none_of_the_others(on: Kernels) -> None:
    pool, kv_c = zeros(2, 4, 1, row_bytes(256, 2)), torch.ones(2, 256)
    kv_c[0, 3], kv_c[1, 130] = float("nan"), float("inf")
    on.ops.write_latent(kv_c, torch.ones(2, 2), pool, torch.tensor([4, 5]))
    found = unpack(pool[1, :2, 0], 256, torch.float32)
    for row, bad in ((0, slice(0, 128)), (1, slice(128, 256))):
        assert found[row, bad].isnan().all() if row == 0 else not found[row, bad].isfinite().any()
        assert int(found[row].isfinite().sum()) == 130


def test_what_is_refused() -> None:
    batch = as_fp8(make_latent_batch(BATCH_SPECS["mixed_small"], rank=16, rope=8, block_size=4))
    q, pool, *metadata = latent_tensors(batch)
    odd = torch.zeros(pool.numel() + 1, dtype=torch.uint8)[1:].view(pool.shape).view(ROW_DTYPE)
    for name, queries, rows, rank in (
        ("kv_cache", q, zeros(4, 4, 1, 24), 16),
        ("kv_cache", q, pool, 12),
        ("kv_cache", q[..., :23], zeros(4, 4, 1, 34), 16),
        ("kv_cache", q, odd, 16),
        ("kv_cache", q, pool.view(torch.uint8).view(torch.float8_e5m2), 16),
        ("q", q.to(ROW_DTYPE), pool, 16),
        ("out", q, pool, 24),
    ):
        out = torch.zeros(*q.shape[:2], rank, dtype=queries.dtype)
        for ops in (REFERENCE, CPU):
            with pytest.raises(ArgumentError, match=f"^{name}: expected"):
                ops.mla_attention(queries, rows, *metadata, out, max_query_len=batch.max_query_len, scale=0.1)
        assert not out.view(torch.uint8).any()


@pytest.mark.parametrize(
    ("name", "kv_c", "k_pe"),
    [
        ("kv_cache", torch.ones(2, 20), torch.ones(2, 8)),
        ("kv_c", torch.ones(2, 16).to(ROW_DTYPE), torch.ones(2, 8)),
        ("k_pe", torch.ones(2, 16), torch.ones(2, 8).half()),
        ("kv_c, k_pe", torch.ones(2, 16), torch.ones(2, 0)),
    ],
)
def test_what_is_not_written(name: str, kv_c: Tensor, k_pe: Tensor) -> None:
    pool = zeros(3, 4, 1, row_bytes(16, 8))
    for ops in (REFERENCE, CPU):
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            ops.write_latent(kv_c, k_pe, pool, torch.tensor([4, 5]))
    assert not pool.view(torch.uint8).any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_opcheck(backend: str) -> None:
    """But for its test of schemas, which multiplies fp8."""
    batch = as_fp8(make_latent_batch(BATCH_SPECS["mixed_padded"], rank=16, rope=8))
    indices, ops = selected(batch, "some"), BACKEND_OPS[backend]
    options = {"max_query_len": batch.max_query_len, "scale": batch.scale, "indices": indices}
    out = torch.zeros(*batch.q.shape[:2], 16)
    written = torch.randn(2, 16), torch.randn(2, 8), zeros(3, 4, 1, 36), torch.tensor([5, -1])
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.mla_attention, (*latent_tensors(batch), out), options, test_utils=utils)
    torch.library.opcheck(ops.write_latent, written, test_utils=utils[:2])
