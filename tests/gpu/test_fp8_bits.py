"""fp8 pools on a GPU: every number is stored as the reference stores it, and NaN that was stored is NaN to
all that read it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import BatchSpec, make_batch, run_paged_attention

pytestmark = pytest.mark.gpu
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def same_numbers(stored: Tensor, want: Tensor) -> bool:
    """Bit by bit; NaN has several patterns."""
    nan = want.double().isnan()
    return torch.equal(stored.double().isnan(), nan) and torch.equal(
        stored.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan]
    )


def every_number(source: torch.dtype) -> Tensor:
    """All bit patterns of a 16-bit dtype; of float32 those with some low bits, which decide about ties. ``[T,
    16, 64]``"""
    x = torch.arange(65536, dtype=torch.int32)
    if source == torch.float32:
        x = ((x << 16)[:, None] | torch.tensor([0, 1, 0x7FFF, 0xFFFF], dtype=torch.int32)).reshape(-1)
        return x.view(source).view(-1, 16, 64)
    return x.to(torch.int16).view(source).view(-1, 16, 64)


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("op", ["write_kv", "rope_write_kv"])
def test_every_number_is_stored_as_by_the_reference(
    op: str, dtype: torch.dtype, source: torch.dtype, scale: float | None
) -> None:
    """Through rope_write_kv all but the two columns that it turns. A scale that is a power of two: a GPU's
    division is not exact."""
    x = every_number(source)
    stored: dict[str, tuple[Tensor, Tensor]] = {}
    for name, device in (("reference", "cpu"), ("triton", "cuda")):
        own = x.to(device)
        caches = [torch.zeros(x.shape[0] // 16 + 2, 16, 16, 64, device=device).to(dtype) for _ in range(2)]
        slots = torch.arange(x.shape[0], device=device) + 16
        scales: dict[str, Any] = {}
        if scale is not None:
            scales = {f"{side}_scale": torch.tensor([scale], device=device) for side in "kv"}
        if op == "write_kv":
            BACKEND_OPS[name].write_kv(own, own.clone(), *caches, slots, **scales)
        else:
            ones = torch.ones_like(own)
            table = torch.tensor([[1.0, 0.0]], device=device).expand(x.shape[0], 2).contiguous()
            positions = torch.arange(x.shape[0], device=device)
            BACKEND_OPS[name].rope_write_kv(
                ones, own, own.clone(), positions, table, slots, ones.clone(), *caches, **scales
            )
        keys, values = (cache.cpu() for cache in caches)
        stored[name] = keys[..., 0 if op == "write_kv" else 2 :], values
    for got, want in zip(stored["triton"], stored["reference"], strict=True):
        assert same_numbers(got, want)


@pytest.mark.parametrize("query_len", [1, 8, 40], ids=["decode", "few", "prefill"])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("side", ["k_cache", "v_cache"])
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_nan_that_was_stored_is_read_as_nan(
    backend: str, side: str, dtype: torch.dtype, q_dtype: torch.dtype, query_len: int
) -> None:
    spec = BatchSpec("nan", (100, 90), (query_len, query_len))
    batch = make_batch(spec, dtype=q_dtype, device="cuda", kv_dtype=dtype)
    clean, _ = run_paged_attention(BACKEND_OPS[backend], batch)
    assert bool(clean.isfinite().all())
    block = int(batch.block_table[0, 2])  # keys 32 to 47 of the first request: all its queries see them
    getattr(batch, side)[block, 3].view(torch.uint8).fill_(0x7F)  # NaN in both dtypes
    out, _ = run_paged_attention(BACKEND_OPS[backend], batch)
    assert bool(out[:query_len].isnan().all()), "a query that sees a NaN gives NaN"
    assert torch.equal(out[query_len:], clean[query_len:])
