"""write_latent: the kernel of ``write_kv``, with the two column ranges of the pool as its pools; rows of fp8
(``mla/fp8_rows.py``) by a kernel of their own."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.mla.check import as_keys_and_values, check_write_latent
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, num_scales
from torchpaged.custom_ops.triton.cache_writes import fence, to_fp8
from torchpaged.custom_ops.triton.interpreter import as_numbers
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import (
    early_launch,
    next_power_of_2,
    require_fp8,
    require_launchable,
)
from torchpaged.custom_ops.triton.records import KeyPool, Tokens


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_fp8_latent(at, number, RANK: tl.constexpr, GROUPS_PAD: tl.constexpr):
    """float32 ``number [GROUPS_PAD, 128]`` of one latent, with the scales of its groups, into the row at
    ``at``; zeros behind its rank."""
    g = tl.arange(0, GROUPS_PAD)
    column = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    top = tl.reduce(tl.abs(number), 1, _larger)  # a NaN stays one in its scale
    scale = tl.where(top == 0.0, 1.0, tl.div_rn(top, 448.0))
    scale = tl.where(scale == 0.0, 1.0, scale)  # of a quotient that is too small
    codes = to_fp8(tl.div_rn(number, scale[:, None]), 448.0, at.dtype.element_ty)
    tl.store(at + column, codes, mask=column < RANK)
    scales_at = (at + RANK).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(scales_at + g, scale, mask=g < (RANK + 127) // 128)


@triton.jit
def write_fp8_kernel(
    kv_c,
    k_pe,
    slots_ptr,
    pool,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """``kv_c``, ``k_pe``: `Tokens`, ``pool``: `KeyPool`. Grid: (num_tokens,)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    SCALES: tl.constexpr = (RANK + 127) // 128
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        column = tl.arange(0, GROUPS_PAD)[:, None] * 128 + tl.arange(0, 128)[None, :]
        e = tl.arange(0, ROPE_PAD)
        latent = tl.load(kv_c.ptr + token * kv_c.token + column, mask=column < RANK, other=0.0)
        at = pool.ptr + slot // BLOCK_SIZE * pool.block + slot % BLOCK_SIZE * pool.slot
        store_fp8_latent(at, as_numbers(latent).to(tl.float32), RANK, GROUPS_PAD)
        rotated = tl.load(k_pe.ptr + token * k_pe.token + e, mask=e < ROPE, other=0.0)
        k_pe_at = (at + RANK + 4 * SCALES).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        tl.store(k_pe_at + e, as_numbers(rotated).to(tl.bfloat16), mask=e < ROPE)
    if PDL:  # as `end_write` of keys of the context
        fence()


def write_latent(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Launch; arguments as in ``custom_ops/mla/schema.py``."""
    require_launchable(kv_c)
    check_write_latent(kv_c, k_pe, kv_cache, slot_mapping)
    if kv_cache.dtype != ROW_DTYPE:
        torch.ops.torchpaged.write_kv.triton(*as_keys_and_values(kv_c, k_pe, kv_cache), slot_mapping)
        return
    require_fp8(kv_cache)
    if not kv_c.shape[0]:
        return
    rank, rope = kv_c.shape[1], k_pe.shape[1]
    launch_kernel(
        write_fp8_kernel,
        (kv_c.shape[0],),
        *(Tokens.of(kv_c[:, None]), Tokens.of(k_pe[:, None]), slot_mapping.contiguous()),
        KeyPool.of(kv_cache, None),
        BLOCK_SIZE=kv_cache.shape[1],
        RANK=rank,
        GROUPS_PAD=next_power_of_2(num_scales(rank)),
        ROPE=rope,
        ROPE_PAD=next_power_of_2(rope),
        num_warps=num_scales(rank) if rank <= 256 else 4,
        **early_launch(kv_c.device),
    )
