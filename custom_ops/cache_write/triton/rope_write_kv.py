"""rope_write_kv: per-head RMSNorm, rotary embedding and the cache write of one step in one launch.

One program takes one token and a few heads, either of q or of k and v: a single token spreads over many
multiprocessors, and large batches take more heads per program. Everything is computed in float32 in
registers; each number is rounded once, when it is stored. The two halves of a rotation are loaded as two
tiles (NeoX style) or as one tile that is split (GPT-J style), so that every access is contiguous and 16 bytes
wide where head_dim allows it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.cache_write.check import check_rope_write_kv
from torchpaged.custom_ops.checks import check_dtype
from torchpaged.custom_ops.triton.cache_writes import begin_write, end_write, to_fp8
from torchpaged.custom_ops.triton.launching import (
    early_launch,
    next_power_of_2,
    require_fp8,
    require_launchable,
)

_MANY_PROGRAMS = 2048  # from here on the GPU is full, and a program had better do more than one warp's work
_MAX_WARPS = 4


@triton.jit
def store_heads(ptr, x, mask, scale, HAS_SCALE: tl.constexpr, LIMIT: tl.constexpr):
    """Store float32 ``x`` in the target's dtype. LIMIT: the largest finite value of an fp8 cache, 0
    for others."""
    if LIMIT > 0:
        if HAS_SCALE:
            x = x / scale
        x = to_fp8(x, LIMIT, ptr.dtype.element_ty)
    tl.store(ptr, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def rope_heads(
    source_ptr,
    source_head,
    target_ptr,
    target_head,
    cos_sin_ptr,
    norm_ptr,
    norm_eps,
    norm_offset,
    scale_ptr,
    scale_head,
    head,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PASS_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Norm, rotate and store ``head [HEADS, 1]`` of one token; the pointers stand at the token's
    first head."""
    HALF: tl.constexpr = ROTARY // 2
    here = head < NUM_HEADS
    d = tl.arange(0, HALF_PAD)[None, :]
    pair = tl.arange(0, 2 * HALF_PAD)[None, :]  # used by INTERLEAVED only
    rest = ROTARY + tl.arange(0, PASS_PAD)[None, :]  # the part of each head that is not rotated
    source = source_ptr + head.to(tl.int64) * source_head  # a head's stride may be that of a whole sequence
    if INTERLEAVED:
        x = tl.load(source + pair, mask=here & (pair < ROTARY), other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (HEADS, HALF_PAD, 2)))  # [HEADS, HALF_PAD] each
    else:
        x1 = tl.load(source + d, mask=here & (d < HALF), other=0.0).to(tl.float32)
        x2 = tl.load(source + HALF + d, mask=here & (d < HALF), other=0.0).to(tl.float32)
    if ROTARY < DIM:
        x3 = tl.load(source + rest, mask=here & (rest < DIM), other=0.0).to(tl.float32)
    if norm_ptr is not None:  # loaded ahead of the sum below, which waits for x
        if INTERLEAVED:
            w = tl.load(norm_ptr + pair, mask=pair < ROTARY, other=0.0).to(tl.float32)
            w1, w2 = tl.split(tl.reshape(w, (1, HALF_PAD, 2)))
        else:
            w1 = tl.load(norm_ptr + d, mask=d < HALF, other=0.0).to(tl.float32)
            w2 = tl.load(norm_ptr + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
        if ROTARY < DIM:
            w3 = tl.load(norm_ptr + rest, mask=rest < DIM, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin_ptr + d, mask=d < HALF, other=0.0).to(tl.float32)
    sin = tl.load(cos_sin_ptr + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1, keep_dims=True)
        if ROTARY < DIM:
            squares += tl.sum(x3 * x3, axis=1, keep_dims=True)
        inverse = tl.rsqrt(squares / DIM + norm_eps)  # [HEADS, 1]
        x1, x2 = x1 * inverse * (norm_offset + w1), x2 * inverse * (norm_offset + w2)
        if ROTARY < DIM:
            x3 = x3 * inverse * (norm_offset + w3)
    scale = tl.load(scale_ptr + head * scale_head, mask=here, other=1.0) if scale_ptr is not None else 1.0
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    target = target_ptr + head.to(tl.int64) * target_head
    if INTERLEAVED:
        y = tl.reshape(tl.join(y1, y2), (HEADS, 2 * HALF_PAD))
        store_heads(target + pair, y, here & (pair < ROTARY), scale, scale_ptr is not None, LIMIT)
    else:
        store_heads(target + d, y1, here & (d < HALF), scale, scale_ptr is not None, LIMIT)
        store_heads(target + HALF + d, y2, here & (d < HALF), scale, scale_ptr is not None, LIMIT)
    if ROTARY < DIM:
        store_heads(target + rest, x3, here & (rest < DIM), scale, scale_ptr is not None, LIMIT)


@triton.jit
def rope_write_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    cos_sin_ptr,
    slot_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_scale_ptr,
    v_scale_ptr,
    norm_eps,
    norm_offset,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    cos_row,
    out_token,
    out_head,
    kc_block,
    kc_slot,
    kc_head,
    vc_block,
    vc_slot,
    vc_head,
    ks_head,
    vs_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PASS_PAD: tl.constexpr,
    DIM_V: tl.constexpr,
    DIM_V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr,
    ARE_QUERY_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_tokens, head groups of q, then head groups of k and v)."""
    begin_write(ARE_QUERY_TOKENS, PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    Q_GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    cos_sin_ptr += tl.load(positions_ptr + token) * cos_row
    if group < Q_GROUPS:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        rope_heads(
            source_ptr=q_ptr + token * q_token,
            source_head=q_head,
            target_ptr=q_out_ptr + token * out_token,
            target_head=out_head,
            cos_sin_ptr=cos_sin_ptr,
            norm_ptr=q_norm_ptr,
            norm_eps=norm_eps,
            norm_offset=norm_offset,
            scale_ptr=None,
            scale_head=0,
            head=head,
            NUM_HEADS=NUM_HEADS,
            HEADS=HEADS,
            DIM=DIM,
            ROTARY=ROTARY,
            HALF_PAD=HALF_PAD,
            PASS_PAD=PASS_PAD,
            INTERLEAVED=INTERLEAVED,
            LIMIT=0.0,
        )
    else:
        slot = tl.load(slot_ptr + token)
        if slot >= 0:
            head = (group - Q_GROUPS) * HEADS + tl.arange(0, HEADS)[:, None]
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            here = head < NUM_KV_HEADS
            d = tl.arange(0, DIM_V_PAD)[None, :]
            # [HEADS, DIM_V_PAD]
            v = tl.load(
                v_ptr + token * v_token + head.to(tl.int64) * v_head + d, mask=here & (d < DIM_V), other=0.0
            )
            rope_heads(
                source_ptr=k_ptr + token * k_token,
                source_head=k_head,
                target_ptr=k_cache_ptr + block * kc_block + offset * kc_slot,
                target_head=kc_head,
                cos_sin_ptr=cos_sin_ptr,
                norm_ptr=k_norm_ptr,
                norm_eps=norm_eps,
                norm_offset=norm_offset,
                scale_ptr=k_scale_ptr,
                scale_head=ks_head,
                head=head,
                NUM_HEADS=NUM_KV_HEADS,
                HEADS=HEADS,
                DIM=DIM,
                ROTARY=ROTARY,
                HALF_PAD=HALF_PAD,
                PASS_PAD=PASS_PAD,
                INTERLEAVED=INTERLEAVED,
                LIMIT=LIMIT,
            )
            scale = (
                tl.load(v_scale_ptr + head * vs_head, mask=here, other=1.0)
                if v_scale_ptr is not None
                else 1.0
            )
            target = v_cache_ptr + block * vc_block + offset * vc_slot + head.to(tl.int64) * vc_head + d
            store_heads(target, v.to(tl.float32), here & (d < DIM_V), scale, v_scale_ptr is not None, LIMIT)
    end_write(ARE_QUERY_TOKENS, PDL)


def head_tiles(
    num_tokens: int, num_heads: int, num_kv_heads: int, widest: int, itemsize: int
) -> tuple[int, int]:
    """``(heads per program, num_warps)``: one warp with one 16-byte access per lane and tile, more once the
    GPU is full.

    ``widest``: the padded width of the widest tile, in numbers.
    """
    most = next_power_of_2(max(num_heads, num_kv_heads))
    heads, num_warps = min(max(32 * 16 // (widest * itemsize), 1), most), 1
    while (
        num_warps < _MAX_WARPS
        and heads < most
        and num_tokens * num_groups(num_heads, num_kv_heads, heads) > _MANY_PROGRAMS
    ):
        heads, num_warps = heads * 2, num_warps * 2
    return heads, num_warps


def num_groups(num_heads: int, num_kv_heads: int, heads: int) -> int:
    """Programs per token: groups of ``heads`` heads of q, then of k and v."""
    return -(-num_heads // heads) + -(-num_kv_heads // heads)


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    are_query_tokens: bool = False,
) -> None:
    """Launch `rope_write_kv_kernel`; arguments as in ``custom_ops/cache_write/schema.py``, in float32,
    bfloat16 or float16."""
    require_launchable(q)
    check_dtype("q", q, torch.bfloat16, torch.float16, torch.float32)
    check_rope_write_kv(
        q,
        k,
        v,
        positions,
        cos_sin,
        slot_mapping,
        q_out,
        k_cache,
        v_cache,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=norm_eps,
        norm_offset=norm_offset,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    require_fp8(k_cache)
    if not q.shape[0]:
        return
    num_heads, num_kv_heads, dim, dim_v, rotary = (
        q.shape[1],
        k.shape[1],
        q.shape[2],
        v.shape[2],
        cos_sin.shape[1],
    )
    half_pad, pass_pad, dim_v_pad = (
        next_power_of_2(rotary // 2),
        next_power_of_2(dim - rotary),
        next_power_of_2(dim_v),
    )
    widest = max(half_pad, pass_pad, dim_v_pad // 2)
    heads, num_warps = head_tiles(q.shape[0], num_heads, num_kv_heads, widest, q.element_size())
    rope_write_kv_kernel[(q.shape[0], num_groups(num_heads, num_kv_heads, heads))](
        q,
        k,
        v,
        positions.contiguous(),
        cos_sin,
        slot_mapping.contiguous(),
        q_out,
        k_cache,
        v_cache,
        q_norm,
        k_norm,
        k_scale,
        v_scale,
        norm_eps,
        norm_offset,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        cos_sin.stride(0),
        *q_out.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        0 if k_scale is None or k_scale.numel() == 1 else k_scale.stride(-1),
        0 if v_scale is None or v_scale.numel() == 1 else v_scale.stride(-1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEADS=heads,
        DIM=dim,
        ROTARY=rotary,
        HALF_PAD=half_pad,
        PASS_PAD=pass_pad,
        DIM_V=dim_v,
        DIM_V_PAD=dim_v_pad,
        BLOCK_SIZE=k_cache.shape[1],
        INTERLEAVED=interleaved,
        LIMIT=torch.finfo(k_cache.dtype).max if k_cache.element_size() == 1 else 0.0,
        ARE_QUERY_TOKENS=are_query_tokens,
        num_warps=num_warps,
        **early_launch(q.device),
    )
