"""The decode kernel's mainloop with a tile of keys cut into slices, one per warp. Legend, ``SPEC`` and
``TILING``: as in attend.py.
"""

import triton
import triton.language as tl

from torchpaged.custom_ops.attention.triton.attend import converted, operand, slot_offset
from torchpaged.custom_ops.attention.triton.block_sparse import place
from torchpaged.custom_ops.attention.triton.rows import beside, capped, seen_by, sloped


@triton.jit
def slice_addresses(block, start, end_key, keys, SPEC: tl.constexpr, TILING: tl.constexpr):
    """Addresses of a tile of keys ``[S, N, D]`` and of one of values ``[S, DV, N]``. Strides are constants,
    so that the addresses of a tile differ by constants."""
    d = tl.arange(0, TILING.dim_pad)[None, None, :]
    dv = tl.arange(0, TILING.dim_v_pad)[None, :, None]
    SLICE: tl.constexpr = TILING.tile_kv // TILING.slices
    slot, k_slot, v_slot = slice_slots(start, end_key, TILING.slices, SLICE, SPEC.block_size)
    k_row = keys.k + (
        block.to(tl.int64) * SPEC.k_strides[0] + slot_offset(slot, SPEC.k_strides[1], SPEC.block_size)
    )
    k_at = k_row[:, :, None] + d + (k_slot.to(tl.int64) * SPEC.k_strides[1])[:, :, None]
    v_row = keys.v + (
        block.to(tl.int64) * SPEC.v_strides[0] + slot_offset(slot, SPEC.v_strides[1], SPEC.block_size)
    )
    v_at = v_row[:, None, :] + dv + (v_slot.to(tl.int64) * SPEC.v_strides[1])[:, None, :]
    return k_at, v_at


@triton.jit
def attend_slices(
    q_ptr,
    q_mask,
    block,
    rows,
    slope,
    low,
    first_key,
    end_key,
    path,
    keys,
    score_scale,
    soft_cap,
    SPEC: tl.constexpr,
    TILING: tl.constexpr,
):
    """Like `attend`, with a tile of keys cut into slices, one per warp, each with a softmax state of its own.

    The dots are batched over slices, so that Triton gives every slice to one warp: no score, probability or
    maximum crosses a warp until the end of the run, where the states are merged. They are transposed, keys x
    queries: mma.sync has 16 rows and 8 columns, and up to 8 queries fill the columns. Returns ``acc [S, DV,
    M]``, for `merge_slices`.

    ``q_ptr [D, M]`` are pointers; ``low``: that of ``rows``, a number if there is one query token, so that
    all rows see the same keys. ``block``: ids of the first tile's blocks, one per slice or per key
    (`slice_blocks`).
    """
    TILE_M: tl.constexpr = TILING.tile_m
    DIM_V_PAD: tl.constexpr = TILING.dim_v_pad
    SLICES: tl.constexpr = TILING.slices
    SLICE: tl.constexpr = TILING.tile_kv // SLICES
    SAME_MASK: tl.constexpr = TILING.query_len == 1 and SPEC.block_sparse is None
    LOG2E: tl.constexpr = 1.4426950408889634
    LOW: tl.constexpr = SPEC.window_left >= 0 or SPEC.chunk_size > 0  # else low is 0 for all rows
    FLOOR: tl.constexpr = -1.0e30  # finite, so that a slice without keys makes no inf - inf
    q = tl.load(q_ptr, mask=q_mask, other=0.0)  # [D, M]
    q, row_scale = operand(q, tl.zeros([TILE_M], tl.float32) + score_scale, keys, 0)
    if not SPEC.soft_cap and not SPEC.alibi:
        row_scale *= LOG2E
    first_seen = first_key
    if LOW:
        if TILING.query_len == 1:
            first_seen = low
        else:
            first_seen = tl.min(low, 0)
    q = tl.broadcast_to(q[None, :, :], [SLICES, TILING.dim_pad, TILE_M])
    maximum = tl.full([SLICES, TILE_M], FLOOR, tl.float32)
    totals = tl.zeros([SLICES, SLICE, TILE_M], tl.float32)  # summed over keys once, at the end
    acc = tl.zeros([SLICES, DIM_V_PAD, TILE_M], tl.float32)
    d = tl.arange(0, TILING.dim_pad)[None, None, :]
    dv = tl.arange(0, TILING.dim_v_pad)[None, :, None]
    for start in range(first_key, end_key, SLICES * SLICE):
        following = place(start + SLICES * SLICE, path, SPEC, TILING)
        start = place(start, path, SPEC, TILING)
        n = start + tl.arange(0, SLICES)[:, None] * SLICE + tl.arange(0, SLICE)[None, :]  # [S, N]
        next_block = slice_blocks(keys.table, following, path.end_key, SLICES, SLICE, SPEC.block_size)
        k_at, v_at = slice_addresses(block, start, path.end_key, keys, SPEC, TILING)
        if SPEC.dim == TILING.dim_pad:
            k = tl.load(k_at)  # [S, N, D]
        else:
            k = tl.load(k_at, mask=d < SPEC.dim, other=0.0)
        k = converted(k, q.dtype)
        s = tl.dot(k, q, input_precision="ieee") * row_scale[None, None, :]  # [S, N, M]
        key = n[:, :, None]
        s = capped(s, soft_cap, SPEC)
        s = sloped(s, key, slope[None, None, :], beside(rows, (0, 1)), SPEC.tree, SPEC)
        if SPEC.soft_cap or SPEC.alibi:
            s *= LOG2E
        if SAME_MASK:
            visible = n < path.end_key
            if LOW:
                visible = visible & (n >= low)
            visible = visible[:, :, None]
        else:
            visible = seen_by(key, beside(rows, (0, 1)), LOW, SPEC)
        s = tl.where(visible, s, float("-inf"))
        top = tl.maximum(maximum, tl.max(s, 1))
        p = tl.exp2(s - top[:, None, :])
        shrink = tl.exp2(maximum - top)
        totals = totals * shrink[:, None, :] + p
        if TILING.holes:
            shown = tl.max(visible.to(tl.int32), 2) > 0
            v = tl.load(v_at, mask=shown[:, None, :] & (dv < SPEC.dim_v), other=0.0)
        elif LOW:  # blocks in front of a window may be gone and hold anything
            v = tl.load(v_at, mask=(n >= first_seen)[:, None, :] & (dv < SPEC.dim_v), other=0.0)
        elif SPEC.dim_v == TILING.dim_v_pad:
            v = tl.load(v_at)  # [S, DV, N]
        else:
            v = tl.load(v_at, mask=dv < SPEC.dim_v, other=0.0)
        v = converted(v, q.dtype)
        acc = acc * shrink[:, None, :] + tl.dot(v, p.to(v.dtype), input_precision="ieee")  # [S, DV, M]
        maximum = top
        block = next_block
    top, total = tl.reduce((maximum, tl.sum(totals, 1)), 0, merge_states)
    return top, total, acc * tl.exp2(maximum - top[None, :])[:, None, :]


@triton.jit
def merge_states(maximum, total, other_maximum, other_total):
    """Of two softmax states ``(maximum, total)``, in base 2."""
    top = tl.maximum(maximum, other_maximum)
    return top, total * tl.exp2(maximum - top) + other_total * tl.exp2(other_maximum - top)


@triton.jit
def merge_slices(acc, SLICES: tl.constexpr):
    """``[M, DV]`` from the ``acc [S, DV, M]`` of `attend_slices`; that of `attend` (SLICES 0) as it is.

    `tl.sum` over a dimension that lies across warps takes three times the instructions of moving it into
    threads, as `tl.split` does.
    """
    if SLICES > 0:
        parts = tl.permute(acc, (2, 1, 0))
        for _ in tl.static_range(SLICES.bit_length() - 1):
            first, second = tl.split(
                tl.reshape(parts, [parts.shape[0], parts.shape[1], parts.shape[2] // 2, 2])
            )
            parts = first + second
        acc = tl.reshape(parts, [parts.shape[0], parts.shape[1]])
    return acc


@triton.jit
def slice_keys(start, end_key, SLICES: tl.constexpr, SLICE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """First keys of the slices of a tile, ``[S, 1]``, or all keys ``[S, N]`` if slices cross blocks; none is
    past the last key.

    A slice past the end gives way to the last one that holds keys, whose values are known to be finite.
    """
    n = start + tl.arange(0, SLICES)[:, None] * SLICE
    if BLOCK_SIZE % SLICE == 0:
        n = tl.minimum(n, (end_key - 1) // SLICE * SLICE)
    else:
        n = tl.minimum(n + tl.arange(0, SLICE)[None, :], end_key - 1)
    return n


@triton.jit
def slice_blocks(
    table_ptr, start, end_key, SLICES: tl.constexpr, SLICE: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Block ids of the tile of keys at ``start``, ``[S, 1]`` or ``[S, N]`` as `slice_keys`."""
    return tl.load(table_ptr + slice_keys(start, end_key, SLICES, SLICE, BLOCK_SIZE) // BLOCK_SIZE)


@triton.jit
def slice_slots(start, end_key, SLICES: tl.constexpr, SLICE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Slots in their blocks: of slices ``[S, 1]``, and of keys and of values from there, ``[1, N]`` or ``[S,
    N]``.

    In a slice that the end cuts, keys are read on, to the end of the block at most; of values the last one is
    read again.
    """
    n = slice_keys(start, end_key, SLICES, SLICE, BLOCK_SIZE)
    if BLOCK_SIZE % SLICE != 0:
        first = tl.zeros([SLICES, 1], tl.int32)
        k_slot = n % BLOCK_SIZE
        v_slot = k_slot
    else:
        first = n % BLOCK_SIZE
        if BLOCK_SIZE == SLICE:  # the compiler does not see that it is 0
            first = tl.zeros([SLICES, 1], tl.int32)
        k_slot = tl.arange(0, SLICE)[None, :]
        v_slot = tl.minimum(k_slot, end_key - 1 - n)
    return first, k_slot, v_slot
