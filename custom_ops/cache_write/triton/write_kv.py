"""write_kv: one program stores one token's keys and values, all heads at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.cache_write.check import check_write_kv
from torchpaged.custom_ops.triton.cache_writes import begin_write, end_write, to_fp8
from torchpaged.custom_ops.triton.launching import (
    early_launch,
    next_power_of_2,
    require_fp8,
    require_launchable,
)

_FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def write_heads(
    source_ptr,
    source_token,
    source_head,
    cache_ptr,
    cache_block,
    cache_slot,
    cache_head,
    scale_ptr,
    scale_head,
    token,
    block,
    offset,
    head,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Store the keys, or the values, of one token: ``head [HEADS_PAD, 1]`` of it."""
    d = tl.arange(0, DIM_PAD)[None, :]
    mask = (head < NUM_HEADS) & (d < DIM)
    # [HEADS_PAD, DIM_PAD]
    x = tl.load(source_ptr + token * source_token + head * source_head + d, mask=mask, other=0.0)
    if LIMIT > 0:
        x = x.to(tl.float32)
        if HAS_SCALE:
            x = x / tl.load(scale_ptr + head * scale_head, mask=head < NUM_HEADS, other=1.0)
        x = to_fp8(x, LIMIT, cache_ptr.dtype.element_ty)
    target = cache_ptr + block * cache_block + offset * cache_slot + head * cache_head + d
    tl.store(target, x.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_token,
    k_head,
    v_token,
    v_head,
    kc_block,
    kc_slot,
    kc_head,
    vc_block,
    vc_slot,
    vc_head,
    ks_head,
    vs_head,
    NUM_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    DIM_V: tl.constexpr,
    DIM_V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    LIMIT: tl.constexpr,
    ARE_QUERY_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_tokens,). LIMIT: the largest finite value of an fp8 cache, 0 for others."""
    begin_write(ARE_QUERY_TOKENS, PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        # int64: a head's stride may be that of a whole sequence
        head = tl.arange(0, HEADS_PAD)[:, None].to(tl.int64)
        write_heads(
            source_ptr=k_ptr,
            source_token=k_token,
            source_head=k_head,
            cache_ptr=k_cache_ptr,
            cache_block=kc_block,
            cache_slot=kc_slot,
            cache_head=kc_head,
            scale_ptr=k_scale_ptr,
            scale_head=ks_head,
            token=token,
            block=block,
            offset=offset,
            head=head,
            NUM_HEADS=NUM_HEADS,
            DIM=DIM,
            DIM_PAD=DIM_PAD,
            HAS_SCALE=HAS_SCALE,
            LIMIT=LIMIT,
        )
        write_heads(
            source_ptr=v_ptr,
            source_token=v_token,
            source_head=v_head,
            cache_ptr=v_cache_ptr,
            cache_block=vc_block,
            cache_slot=vc_slot,
            cache_head=vc_head,
            scale_ptr=v_scale_ptr,
            scale_head=vs_head,
            token=token,
            block=block,
            offset=offset,
            head=head,
            NUM_HEADS=NUM_HEADS,
            DIM=DIM_V,
            DIM_PAD=DIM_V_PAD,
            HAS_SCALE=HAS_SCALE,
            LIMIT=LIMIT,
        )
    end_write(ARE_QUERY_TOKENS, PDL)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    are_query_tokens: bool = False,
) -> None:
    """Launch `write_kv_kernel`; arguments as in ``custom_ops/cache_write/schema.py``."""
    require_launchable(k)
    check_write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    require_fp8(k_cache)
    if not k.shape[0]:
        return
    if (k_scale is None) != (v_scale is None):  # one flag serves both
        one = torch.ones(1, dtype=torch.float32, device=k.device)
        k_scale, v_scale = one if k_scale is None else k_scale, one if v_scale is None else v_scale
    num_heads, dim, dim_v = k_cache.shape[2], k_cache.shape[3], v_cache.shape[3]
    slot_mapping = slot_mapping.contiguous()
    write_kv_kernel[(k.shape[0],)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale,
        v_scale,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        0 if k_scale is None or k_scale.numel() == 1 else k_scale.stride(-1),
        0 if v_scale is None or v_scale.numel() == 1 else v_scale.stride(-1),
        NUM_HEADS=num_heads,
        HEADS_PAD=next_power_of_2(num_heads),
        DIM=dim,
        DIM_PAD=next_power_of_2(dim),
        DIM_V=dim_v,
        DIM_V_PAD=next_power_of_2(dim_v),
        BLOCK_SIZE=k_cache.shape[1],
        HAS_SCALE=k_scale is not None,
        LIMIT=_FP8.get(k_cache.dtype, 0.0),
        ARE_QUERY_TOKENS=are_query_tokens,
        num_warps=4,
        **early_launch(k.device),
    )
