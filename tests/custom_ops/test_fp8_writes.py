"""fp8 pools: what is stored is x / scale, saturated; NaN stays NaN. In the reference and the native kernel,
and in Triton where it is interpreted."""

import math
from typing import Any

import pytest
import torch
from kernels import INTERPRETED, Kernels, over
from torch import Tensor

from torchpaged import AttentionMetadata, PagedAttention, PagedKVCache, use_backend, write_kv
from torchpaged.custom_ops import BACKEND_OPS

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def edges(dtype: torch.dtype, source: torch.dtype) -> Tensor:
    """Numbers around the ends of an fp8 dtype's range, in ``source``: 8 columns."""
    largest = torch.finfo(dtype).max
    beyond = (
        largest * 1.001,
        largest * 1.0625,
        largest * 1.0714286,
        largest * 1.25,
        2 * largest,
        torch.finfo(source).max,
        math.inf,
    )
    inside = (
        largest,
        largest * 0.97,
        1.0,
        0.0,
        torch.finfo(dtype).tiny,
        torch.finfo(dtype).tiny / 8,
        1e-30,
        math.nan,
    )
    numbers = torch.tensor([*beyond, *inside, 3.3], dtype=torch.float64)
    return torch.cat([numbers, -numbers]).to(source).view(-1, 8)


def assert_saturated(stored: Tensor, x: Tensor, scale: float) -> None:
    """By the rule of docs/ops.md, without the library's words."""
    dtype, exact = stored.dtype, x.double() / scale
    got, largest = stored.double(), torch.finfo(dtype).max
    assert torch.equal(got.isnan(), exact.isnan())
    assert not bool(got.isinf().any())
    high = exact.abs() >= largest
    assert torch.equal(got[high], exact[high].sign() * largest)
    inside = ~high & ~exact.isnan()
    step = exact.abs().clamp_min(torch.finfo(dtype).smallest_normal) * torch.finfo(dtype).eps
    # the interpreter's own conversions do not round as a GPU does
    most = 1.01 if INTERPRETED else 0.51
    assert bool(((got - exact).abs() <= most * step)[inside].all())


@pytest.mark.parametrize("scale", [None, 0.5, 3.0])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("op", ["write_kv", "rope_write_kv"])
@over("reference", "cpu", "triton", gpu=())
def test_writes_saturate(
    on: Kernels, op: str, dtype: torch.dtype, source: torch.dtype, scale: float | None
) -> None:
    x = edges(dtype, source)[:, None]  # [T, 1, 8]
    if INTERPRETED and (dtype, source) != (torch.float8_e5m2, torch.float32):
        # the interpreter's own conversions make other numbers of NaN
        x = x.nan_to_num(2.0, posinf=math.inf, neginf=-math.inf)
    tokens = x.shape[0]
    caches = [torch.zeros(3, 4, 1, 8, dtype=dtype) for _ in range(2)]
    slots = torch.arange(tokens) + 4
    scales: dict[str, Any] = (
        {} if scale is None else {"k_scale": torch.tensor([scale]), "v_scale": torch.tensor([scale])}
    )
    if op == "write_kv":
        on.ops.write_kv(x, x.clone(), *caches, slots, **scales)
    else:  # the last six columns are not rotated; the first two are turned by nothing
        table = torch.tensor([[1.0, 0.0]]).expand(tokens, 2).contiguous()
        q = torch.zeros(tokens, 1, 8, dtype=source)
        on.ops.rope_write_kv(
            q, x, x.clone(), torch.arange(tokens), table, slots, torch.empty_like(q), *caches, **scales
        )
    for name, cache in zip("kv", caches, strict=True):
        # inf * 0 is NaN in a rotation
        columns = slice(2, 8) if op == "rope_write_kv" and name == "k" else slice(0, 8)
        assert_saturated(cache.view(-1, 8)[4 : 4 + tokens, columns], x[:, 0, columns].clone(), scale or 1.0)


def same_numbers(stored: Tensor, want: Tensor) -> bool:
    """Bit by bit; NaN has several patterns."""
    nan = want.double().isnan()
    return torch.equal(stored.double().isnan(), nan) and torch.equal(
        stored.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan]
    )


@pytest.mark.parametrize("scale", [None, 3.0])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
@over("reference", "cpu", "triton", gpu=())
def test_every_number_is_rounded_to_the_nearest(
    on: Kernels, dtype: torch.dtype, source: torch.dtype, scale: float | None
) -> None:
    """All bit patterns of a 16-bit dtype, and for float32 those with a few low bits, which decide
    about ties."""
    if INTERPRETED and dtype == torch.float8_e4m3fn:
        pytest.skip("the interpreter's own conversion to e4m3 does not round as a GPU does")
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    if source == torch.float32:
        low = torch.tensor([0, 1, 0x7FFF, 0xFFFF], dtype=torch.int32)
        x = ((x.to(torch.int32) << 16)[:, None] | low).reshape(-1)
    x = x.view(source).view(-1, 64, 64)  # [T, num_kv_heads, head_dim]
    caches = [torch.zeros(x.shape[0] // 16 + 2, 16, 64, 64, dtype=dtype) for _ in range(2)]
    scales: dict[str, Any] = (
        {} if scale is None else {"k_scale": torch.tensor([scale]), "v_scale": torch.tensor([scale])}
    )
    on.ops.write_kv(x, x.clone(), *caches, torch.arange(x.shape[0]) + 16, **scales)
    largest = torch.finfo(dtype).max
    want = (x.float() / (scale or 1.0)).clamp(-largest, largest).to(dtype)  # a clamp keeps NaN
    for cache in caches:
        assert same_numbers(cache.view(-1, 64, 64)[16 : 16 + x.shape[0]], want)


@pytest.mark.skipif(INTERPRETED, reason="of the CPU's own kernels")
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_the_native_write_is_the_references(dtype: torch.dtype, native: None) -> None:
    """With a scale per head in a column of another tensor, heads before tokens in the pools, slices of a
    fused projection, and slots that are skipped."""
    fused, scales = torch.randn(5, 9, 24).bfloat16() * 300, torch.tensor([[0.5, 9.0], [2.0, 9.0]])[:, 0]
    slots = torch.tensor([9, -1, 4, 5, 11])
    stored = []
    for name in ("reference", "cpu"):
        k_cache, v_cache = (torch.zeros(3, 2, 4, d, dtype=dtype).transpose(1, 2) for d in (24, 20))
        given = fused[:, 3:5], fused[:, 5:7, :20], k_cache, v_cache, slots
        BACKEND_OPS[name].write_kv(*given, scales, scales[:1])
        stored.append((k_cache, v_cache))
    assert all(same_numbers(*pair) for pair in zip(*stored, strict=True))
    assert bool(stored[0][0].float().any())


@pytest.mark.skipif(INTERPRETED, reason="of the CPU's own kernels")
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_a_backend_without_a_write_of_its_own_takes_fp8_pools(dtype: torch.dtype, native: None) -> None:
    """It declares them, and a step begins with the device's own write."""
    q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    batch = AttentionMetadata.from_lists([5], [5], [[2]], block_size=8)
    outs = []
    for backend in ("torch_sdpa", "reference"):
        pools = PagedKVCache.uniform(1, 2, 16, block_size=8, num_blocks=4, dtype=dtype)[0]
        with torch.inference_mode():
            outs.append(PagedAttention(4, 16, 2, kv_dtype=dtype, backend=backend)(q, k, v, pools, batch))
            with use_backend(backend):
                write_kv(k, v, *pools[:2], batch.slot_mapping)
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
