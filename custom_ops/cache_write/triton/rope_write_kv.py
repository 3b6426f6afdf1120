"""rope_write_kv: per-head RMSNorm, rotary embedding and the cache write of one step in one launch.

One program takes one token and a few heads, either of q or of k and v: a single token spreads over many
multiprocessors, and large batches take more heads per program. Everything is computed in float32 in
registers; each number is rounded once, when it is stored. The two halves of a rotation are loaded as two
tiles (NeoX style) or as one tile that is split (GPT-J style), so that every access is contiguous and 16 bytes
wide where head_dim allows it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchpaged.custom_ops.cache_write.call import RotatedWriteCall
from torchpaged.custom_ops.cache_write.check import check_rope_write_kv
from torchpaged.custom_ops.triton.cache_writes import (
    begin_write,
    end_write,
    load_early,
    to_fp8,
    wait_for_tokens,
)
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import (
    early_launch,
    fp8_limit,
    next_power_of_2,
    require_floats,
    require_fp8,
)
from torchpaged.custom_ops.triton.records import Pool, Tokens

_MANY_PROGRAMS = 2048  # from here on the GPU is full, and a program had better do more than one warp's work
_MAX_WARPS = 4


class Norm(NamedTuple):
    """Pointer to the weights of a norm, or None, and its numbers."""

    weight: Any
    eps: float
    offset: float


class RotationSizes(NamedTuple):
    """What the kernel is compiled for; ``heads``: per program; pads: columns of tiles of half of the rotated
    part of a head, of the other part, and of a value."""

    num_heads: int
    num_kv_heads: int
    heads: int
    dim: int
    rotary: int
    half_pad: int
    pass_pad: int
    dim_v: int
    dim_v_pad: int
    block_size: int
    interleaved: bool


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
def load_turn(cos_sin_ptr, norm, SIZES: tl.constexpr):
    """Cosines and sines ``[1, HALF_PAD]`` of a token, and a norm's weights of both halves of the rotated part
    and of the rest, ones without a norm: in float32, ahead of what they are for."""
    HALF: tl.constexpr = SIZES.rotary // 2
    d = tl.arange(0, SIZES.half_pad)[None, :]
    rest = SIZES.rotary + tl.arange(0, SIZES.pass_pad)[None, :]
    cos = tl.load(cos_sin_ptr + d, mask=d < HALF, other=0.0).to(tl.float32)
    sin = tl.load(cos_sin_ptr + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    w1, w2 = tl.full((1, SIZES.half_pad), 1.0, tl.float32), tl.full((1, SIZES.half_pad), 1.0, tl.float32)
    w3 = tl.full((1, SIZES.pass_pad), 1.0, tl.float32)
    if norm.weight is not None:
        if SIZES.interleaved:
            pair = tl.arange(0, 2 * SIZES.half_pad)[None, :]
            w = tl.load(norm.weight + pair, mask=pair < SIZES.rotary, other=0.0).to(tl.float32)
            w1, w2 = tl.split(tl.reshape(w, (1, SIZES.half_pad, 2)))
        else:
            w1 = tl.load(norm.weight + d, mask=d < HALF, other=0.0).to(tl.float32)
            w2 = tl.load(norm.weight + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
        if SIZES.rotary < SIZES.dim:
            w3 = tl.load(norm.weight + rest, mask=rest < SIZES.dim, other=0.0).to(tl.float32)
    return cos, sin, w1, w2, w3


@triton.jit
def rope_heads(
    source_ptr,
    source_head,
    target_ptr,
    target_head,
    turn,
    norm,
    scale_ptr,
    scale_head,
    head,
    NUM_HEADS: tl.constexpr,
    SIZES: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Norm, rotate and store ``head [HEADS, 1]`` of one token by its ``turn``, of `load_turn`; the pointers
    stand at the token's first head."""
    HEADS: tl.constexpr = SIZES.heads
    DIM: tl.constexpr = SIZES.dim
    ROTARY: tl.constexpr = SIZES.rotary
    HALF_PAD: tl.constexpr = SIZES.half_pad
    HALF: tl.constexpr = ROTARY // 2
    here = head < NUM_HEADS
    d = tl.arange(0, HALF_PAD)[None, :]
    pair = tl.arange(0, 2 * HALF_PAD)[None, :]  # used if interleaved only
    rest = ROTARY + tl.arange(0, SIZES.pass_pad)[None, :]  # the part of each head that is not rotated
    source = source_ptr + head.to(tl.int64) * source_head  # a head's stride may be that of a whole sequence
    if SIZES.interleaved:
        x = tl.load(source + pair, mask=here & (pair < ROTARY), other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (HEADS, HALF_PAD, 2)))  # [HEADS, HALF_PAD] each
    else:
        x1 = tl.load(source + d, mask=here & (d < HALF), other=0.0).to(tl.float32)
        x2 = tl.load(source + HALF + d, mask=here & (d < HALF), other=0.0).to(tl.float32)
    if ROTARY < DIM:
        x3 = tl.load(source + rest, mask=here & (rest < DIM), other=0.0).to(tl.float32)
    cos, sin, w1, w2, w3 = turn
    if norm.weight is not None:
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1, keep_dims=True)
        if ROTARY < DIM:
            squares += tl.sum(x3 * x3, axis=1, keep_dims=True)
        inverse = tl.rsqrt(squares / DIM + norm.eps)  # [HEADS, 1]
        x1, x2 = x1 * inverse * (norm.offset + w1), x2 * inverse * (norm.offset + w2)
        if ROTARY < DIM:
            x3 = x3 * inverse * (norm.offset + w3)
    scale = tl.load(scale_ptr + head * scale_head, mask=here, other=1.0) if scale_ptr is not None else 1.0
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    target = target_ptr + head.to(tl.int64) * target_head
    if SIZES.interleaved:
        y = tl.reshape(tl.join(y1, y2), (HEADS, 2 * HALF_PAD))
        store_heads(target + pair, y, here & (pair < ROTARY), scale, scale_ptr is not None, LIMIT)
    else:
        store_heads(target + d, y1, here & (d < HALF), scale, scale_ptr is not None, LIMIT)
        store_heads(target + HALF + d, y2, here & (d < HALF), scale, scale_ptr is not None, LIMIT)
    if ROTARY < DIM:
        store_heads(target + rest, x3, here & (rest < DIM), scale, scale_ptr is not None, LIMIT)


@triton.jit
def rope_write_kv_kernel(
    q,
    k,
    v,
    q_out,
    k_pool,
    v_pool,
    positions_ptr,
    cos_sin_ptr,
    cos_row,
    slot_ptr,
    q_norm,
    k_norm,
    SIZES: tl.constexpr,
    LIMIT: tl.constexpr,
    ARE_QUERY_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """``q``, ``k``, ``v``, ``q_out``: `Tokens`; ``k_pool``, ``v_pool``: `Pool`; norms: `Norm`.
    Grid: (num_tokens, head groups of q, then head groups of k and v). LIMIT: as `fp8_limit` gives it."""
    HEADS: tl.constexpr = SIZES.heads
    Q_GROUPS: tl.constexpr = (SIZES.num_heads + HEADS - 1) // HEADS
    begin_write(ARE_QUERY_TOKENS, PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    cos_sin_ptr += load_early(positions_ptr + token) * cos_row
    if group < Q_GROUPS:
        turn = load_turn(cos_sin_ptr, q_norm, SIZES)
        wait_for_tokens(ARE_QUERY_TOKENS, PDL)
        rope_heads(
            source_ptr=q.ptr + token * q.token,
            source_head=q.head,
            target_ptr=q_out.ptr + token * q_out.token,
            target_head=q_out.head,
            turn=turn,
            norm=q_norm,
            scale_ptr=None,
            scale_head=0,
            head=group * HEADS + tl.arange(0, HEADS)[:, None],
            NUM_HEADS=SIZES.num_heads,
            SIZES=SIZES,
            LIMIT=0.0,
        )
    else:
        slot = load_early(slot_ptr + token)
        turn = load_turn(cos_sin_ptr, k_norm, SIZES)
        wait_for_tokens(ARE_QUERY_TOKENS, PDL)
        if slot >= 0:
            head = (group - Q_GROUPS) * HEADS + tl.arange(0, HEADS)[:, None]
            block, offset = slot // SIZES.block_size, slot % SIZES.block_size
            here = head < SIZES.num_kv_heads
            d = tl.arange(0, SIZES.dim_v_pad)[None, :]
            mask = here & (d < SIZES.dim_v)
            # [HEADS, DIM_V_PAD]
            x = tl.load(v.ptr + token * v.token + head.to(tl.int64) * v.head + d, mask=mask, other=0.0)
            rope_heads(
                source_ptr=k.ptr + token * k.token,
                source_head=k.head,
                target_ptr=k_pool.ptr + block * k_pool.block + offset * k_pool.slot,
                target_head=k_pool.head,
                turn=turn,
                norm=k_norm,
                scale_ptr=k_pool.scale,
                scale_head=k_pool.scale_head,
                head=head,
                NUM_HEADS=SIZES.num_kv_heads,
                SIZES=SIZES,
                LIMIT=LIMIT,
            )
            scale = 1.0
            if v_pool.scale is not None:
                scale = tl.load(v_pool.scale + head * v_pool.scale_head, mask=here, other=1.0)
            target = v_pool.ptr + block * v_pool.block + offset * v_pool.slot
            target += head.to(tl.int64) * v_pool.head + d
            store_heads(target, x.to(tl.float32), mask, scale, v_pool.scale is not None, LIMIT)
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


def rope_write_kv(call: RotatedWriteCall) -> None:
    """Launch `rope_write_kv_kernel`; arguments as in ``custom_ops/cache_write/schema.py``, in float32,
    bfloat16 or float16."""
    q, k, v, positions, cos_sin, slot_mapping, q_out, k_cache, v_cache = call[:9]
    require_floats(q=q)
    check_rope_write_kv(call)
    require_fp8(k_cache)
    if not q.shape[0]:
        return
    num_heads, num_kv_heads, dim, dim_v = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
    rotary = cos_sin.shape[1]
    half_pad, pass_pad, dim_v_pad = map(next_power_of_2, (rotary // 2, dim - rotary, dim_v))
    widths = dim, rotary, half_pad, pass_pad, dim_v, dim_v_pad
    widest = max(half_pad, pass_pad, dim_v_pad // 2)
    heads, num_warps = head_tiles(q.shape[0], num_heads, num_kv_heads, widest, q.element_size())
    launch_kernel(
        rope_write_kv_kernel,
        (q.shape[0], num_groups(num_heads, num_kv_heads, heads)),
        *map(Tokens.of, (q, k, v, q_out)),
        *(Pool.of(k_cache, call.scales.k_scale), Pool.of(v_cache, call.scales.v_scale)),
        *(positions.contiguous(), cos_sin, cos_sin.stride(0), slot_mapping.contiguous()),
        *(Norm(weight, call.norm_eps, call.norm_offset) for weight in (call.q_norm, call.k_norm)),
        SIZES=RotationSizes(num_heads, num_kv_heads, heads, *widths, k_cache.shape[1], call.interleaved),
        LIMIT=fp8_limit(k_cache),
        ARE_QUERY_TOKENS=call.are_query_tokens,
        num_warps=num_warps,
        **early_launch(q.device),
    )
