"""What both attention kernels share: the records that their functions hand on, masks, and the decode kernel's
mainloop, query rows against a range of paged keys with an online softmax.

Legend: M rows of a tile = query tokens x heads of the group; N keys of a tile; D, DV padded widths.

``SPEC`` is the call's `Specialisation`, ``TILING`` a record of paged_attention.py. A field that goes into a
shape is a ``tl.constexpr`` of the function first: Triton takes no plain number there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchpaged.custom_ops.attention.triton.block_sparse import place, sees_block, shifts_of
from torchpaged.custom_ops.triton.interpreter import INTERPRET, as_numbers


class Rows(NamedTuple):
    """Query rows of a work tile, ``[M]`` but for ``context``.

    Attributes:
        valid: the row is one of the request's.
        position: over the keys; under a tree mask over those that the row sees.
        low, end: keys that the row sees; under a tree mask ``low`` bounds positions.
        word, context: as in `branch_sees`.
        shift: as in `sees_block`.
    """

    valid: Any
    position: Any
    low: Any
    end: Any
    word: Any
    context: Any
    shift: Any


class Keys(NamedTuple):
    """Where a request's keys and values of one kv head are: its row of the block table, the pools at
    that head."""

    table: Any
    k: Any
    v: Any


@triton.jit
def tanh(x):
    """tanh in float32: a series near 0, where the formula with exp cancels."""
    x2 = x * x
    series = x * (
        1.0 + x2 * (-0.33333333333 + x2 * (0.13333333333 + x2 * (-0.05396825397 + x2 * 0.02186948854)))
    )
    far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return tl.where(tl.abs(x) < 0.3, series, far)


@triton.jit
def visible_range(position, seq_len, SPEC: tl.constexpr):
    """The keys ``[low, end)`` between the first and the last that a query at ``position`` sees. Empty below
    position 0."""
    low = tl.zeros_like(position)
    end = tl.zeros_like(position) + seq_len
    if SPEC.causal:
        end = tl.minimum(end, position + 1)
    if SPEC.window_left >= 0:
        low = tl.maximum(low, position - SPEC.window_left)
    if SPEC.window_right >= 0:
        end = tl.minimum(end, position + SPEC.window_right + 1)
    if SPEC.chunk_size > 0:
        chunk = position // SPEC.chunk_size * SPEC.chunk_size
        low = tl.maximum(low, chunk)
        end = tl.minimum(end, chunk + SPEC.chunk_size)
    end = tl.where(position < 0, 0, end)
    return low, tl.maximum(end, low)


@triton.jit
def count_bits(x):
    """Set bits of int64 numbers that are not negative."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    x = x + (x >> 32)
    return (x & 127).to(tl.int32)


@triton.jit
def branch_of(tree_ptr, start, query, context, valid):
    """Of rows ``query [M]`` of a request whose token rows begin at ``start``: what they see of its query
    tokens under a tree mask, a bit each, and their positions, counted over that and the context."""
    own = (tl.zeros_like(query) + 1).to(tl.int64) << tl.minimum(query, 63)
    word = tl.load(tree_ptr + (start + query), mask=valid, other=0) & (own - 1)
    return word | own, context + count_bits(word)


@triton.jit
def query_rows(inputs, start, query, head, query_len, seq_len, valid, SPEC: tl.constexpr):
    """The `Rows` of query tokens ``query [M]``, of heads ``head [M]``, of a request whose token rows begin at
    ``start``."""
    position = seq_len - query_len + query
    low, end = visible_range(position, seq_len, SPEC)
    word = position
    context = seq_len - query_len
    if SPEC.tree:  # low bounds positions, of which a key's is never above its place
        word, position = branch_of(inputs.tree, start, query, context, valid)
        low, _ = visible_range(position, seq_len, SPEC)
    end = tl.where(valid, end, low)
    shift = position
    if SPEC.block_sparse is not None:
        shift = shifts_of(head, SPEC)
    return Rows(valid, position, low, end, word, context, shift)


@triton.jit
def beside(rows, AXES: tl.constexpr):
    """The same `Rows` with their one dimension at the place that ``AXES`` leave free, to meet keys."""
    valid, position = tl.expand_dims(rows.valid, AXES), tl.expand_dims(rows.position, AXES)
    low, end = tl.expand_dims(rows.low, AXES), tl.expand_dims(rows.end, AXES)
    word, shift = tl.expand_dims(rows.word, AXES), tl.expand_dims(rows.shift, AXES)
    return Rows(valid, position, low, end, word, rows.context, shift)


@triton.jit
def branch_position(word, context, key):
    """Where a key counts as being for a row of this word; its own key at the furthest."""
    token = tl.minimum(tl.maximum(key - context, 0), 63)
    before = ((tl.zeros_like(token) + 1).to(tl.int64) << token) - 1
    return tl.where(key < context, key, context + count_bits(word & before))


@triton.jit
def branch_sees(rows, key, LOW: tl.constexpr):
    """Whether rows see a key that is not behind their own. LOW: rows may not see the first
    positions."""
    token = tl.minimum(tl.maximum(key - rows.context, 0), 63)
    seen = (key < rows.context) | (((rows.word >> token) & 1) != 0)
    if LOW:
        seen = seen & (branch_position(rows.word, rows.context, key) >= rows.low)
    return seen


@triton.jit
def seen_by(key, rows, LOW: tl.constexpr, SPEC: tl.constexpr, tile=None):
    """Whether rows, which lie `beside` the keys, see them. LOW: as in `branch_sees`; ``tile``: where all keys
    are of one block of a mask that hides blocks, one of them: asked once a row, not once a key."""
    seen = key < rows.end
    if LOW:
        seen = seen & (key >= rows.low)
    if SPEC.tree:
        seen = seen & branch_sees(rows, key, LOW)
    if SPEC.block_sparse is not None:
        if tile is None:
            seen = seen & sees_block(rows, key, SPEC)
        else:
            seen = seen & sees_block(rows, tile, SPEC)
    return seen


@triton.jit
def capped(s, soft_cap, SPEC: tl.constexpr):
    """Scores behind the soft cap."""
    if SPEC.soft_cap:
        s = soft_cap * tanh(s / soft_cap)
    return s


@triton.jit
def sloped(s, key, slope, rows, TREE: tl.constexpr, SPEC: tl.constexpr):
    """Scores of keys behind ALiBi; tensors as in `seen_by`. TREE: positions are a branch's."""
    if SPEC.alibi:
        if TREE:
            key = branch_position(rows.word, rows.context, key)
        s += slope * (key - rows.position).to(tl.float32)
    return s


@triton.jit
def slot_offset(slot, stride: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """``slot * stride`` inside a block: in 64 bits where the block's last slot needs them, in 32 where
    it doesn't."""
    if BLOCK_SIZE * stride >= 2147483648:
        slot = slot.to(tl.int64)
    return slot * stride


@triton.jit
def operand(q, row_scale, keys, DIM: tl.constexpr):
    """Queries as the products take them, and what scores are multiplied by, a number per row; ``DIM``: that
    of the columns.

    fp8 converts to fp16 in one instruction, to bf16 in several. A power of two per row keeps q inside fp16's
    range (numbers below 2^-14 of a row's largest lose bits, no more).
    """
    FP8: tl.constexpr = keys.k.dtype.element_ty.primitive_bitwidth == 8
    if INTERPRET:
        q = as_numbers(q)
    elif FP8 and q.dtype == tl.bfloat16:
        largest = tl.max(tl.abs(q.to(tl.float32)), DIM)
        # Of an infinite q finite, so that it stays infinite.
        fold = tl.exp2(tl.ceil(tl.log2(tl.minimum(tl.maximum(largest, 1e-30), 1e37))))
        q = (q.to(tl.float32) / tl.expand_dims(fold, DIM)).to(tl.float16)
        row_scale *= fold
    return q, row_scale


@triton.jit
def converted(x, dtype: tl.constexpr):
    """Keys or values of the pool in the queries' dtype, which is none of 16 bits in the interpreter."""
    return x.to(tl.float32 if INTERPRET else dtype)


@triton.jit
def attend(
    q,
    rows,
    slope,
    first_key,
    end_key,
    path,
    keys,
    score_scale,
    soft_cap,
    SPEC: tl.constexpr,
    TILING: tl.constexpr,
):
    """Returns ``(maximum [M], total [M], acc [M, DV])``, scores in base 2.

    ``first_key``, ``end_key``: ordinals (`place`). Keys at or past ``path.end_key`` are never read.
    ``score_scale`` holds the softmax scale and the cache's k_scale. Block ids are read two tiles ahead, so
    that the loads of keys and values are the only ones behind the software pipeline: a load whose address is
    itself pipelined would halve its depth.
    """
    TILE_M: tl.constexpr = TILING.tile_m
    TILE_KV: tl.constexpr = TILING.tile_kv
    DIM_V_PAD: tl.constexpr = TILING.dim_v_pad
    LOG2E: tl.constexpr = 1.4426950408889634
    LOW: tl.constexpr = SPEC.window_left >= 0 or SPEC.chunk_size > 0  # else low is 0 for all rows
    # tiles may hold keys that no row sees, whose values may be NaN
    HOLES: tl.constexpr = SPEC.block_sparse is not None and TILING.verticals == 0
    q, row_scale = operand(q, tl.zeros([TILE_M], tl.float32) + score_scale, keys, 1)
    # finite, so that a row that sees nothing yet makes no inf - inf
    maximum = tl.full([TILE_M], -1.0e30, tl.float32)
    totals = tl.zeros([TILE_M, TILE_KV], tl.float32)  # summed over keys once, at the end
    acc = tl.zeros([TILE_M, DIM_V_PAD], tl.float32)
    first_seen = first_key
    if LOW:
        first_seen = tl.min(rows.low, 0)
    d = tl.arange(0, TILING.dim_pad)
    dv = tl.arange(0, TILING.dim_v_pad)
    ahead = place(first_key, path, SPEC, TILING) + tl.arange(0, TILE_KV)
    block = tl.load(keys.table + ahead // SPEC.block_size, mask=ahead < path.end_key, other=0)
    column = beside(rows, 1)
    for start in range(first_key, end_key, TILE_KV):
        n = place(start, path, SPEC, TILING) + tl.arange(0, TILE_KV)
        inside = n < path.end_key
        ahead = place(start + TILE_KV, path, SPEC, TILING) + tl.arange(0, TILE_KV)
        next_block = tl.load(keys.table + ahead // SPEC.block_size, mask=ahead < path.end_key, other=0)
        offset = (n % SPEC.block_size).to(tl.int64)
        k_at = keys.k + (block.to(tl.int64) * SPEC.k_strides[0] + offset * SPEC.k_strides[1])[None, :]
        k_mask = (d < SPEC.dim)[:, None] & inside[None, :]
        k = converted(tl.load(k_at + d[:, None], mask=k_mask, other=0.0), q.dtype)  # [D, N]
        s = tl.dot(q, k, input_precision="ieee") * row_scale[:, None]  # [M, N]
        s = capped(s, soft_cap, SPEC)
        s = sloped(s, n[None, :], slope[:, None], column, SPEC.tree, SPEC)
        visible = seen_by(n[None, :], column, LOW, SPEC)
        s = tl.where(visible, s * LOG2E, float("-inf"))
        top = tl.maximum(maximum, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        shrink = tl.exp2(maximum - top)
        totals = totals * shrink[:, None] + p
        v_at = keys.v + (block.to(tl.int64) * SPEC.v_strides[0] + offset * SPEC.v_strides[1])[:, None]
        seen = inside
        if LOW:  # blocks in front of a window may be gone and hold anything
            seen = inside & (n >= first_seen)
        if HOLES:
            seen = seen & (tl.max(visible.to(tl.int32), 0) > 0)
        v_mask = seen[:, None] & (dv < SPEC.dim_v)[None, :]
        v = converted(tl.load(v_at + dv[None, :], mask=v_mask, other=0.0), q.dtype)  # [N, DV]
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        maximum = top
        block = next_block
    return maximum, tl.sum(totals, 1), acc


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
    HOLES: tl.constexpr = SPEC.block_sparse is not None and TILING.verticals == 0  # as in `attend`
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
        if HOLES:
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


@triton.jit
def keys_of(inputs, batch, request, kv_head, k_head, v_head):
    """The `Keys` of a request and kv head; ``k_head``, ``v_head``: strides."""
    return Keys(
        batch.table + request.to(tl.int64) * batch.table_row,
        inputs.k + kv_head.to(tl.int64) * k_head,
        inputs.v + kv_head.to(tl.int64) * v_head,
    )


@triton.jit
def load_slopes(inputs, head, valid, SPEC: tl.constexpr):
    """ALiBi's slopes of ``head [M]``; zeros where there are none."""
    slope = tl.zeros([head.shape[0]], tl.float32)
    if SPEC.alibi:
        slope = tl.load(inputs.slopes + head, mask=valid, other=0.0)
    return slope


@triton.jit
def load_sinks(inputs, head, valid, SPEC: tl.constexpr):
    """Sinks of ``head [M]``; zeros where there are none."""
    sink = tl.zeros([head.shape[0]], tl.float32)
    if SPEC.sinks:
        sink = tl.load(inputs.sinks + head, mask=valid, other=0.0).to(tl.float32)
    return sink


@triton.jit
def finish(maximum, total, acc, sink, v_scale, sees, SINKS: tl.constexpr):
    """``(out [M, DV], lse [M])`` from a finished state; the sink joins the denominator; rows without keys
    (not ``sees [M]``): 0 and -inf.

    ``total`` does not tell who sees: it is NaN where a score was NaN or +inf, and 0 where all were -inf,
    which makes 0 / 0.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    if SINKS:
        top = tl.maximum(maximum, sink * LOG2E)
        shrink = tl.exp2(maximum - top)
        total = total * shrink + tl.exp2(sink * LOG2E - top)
        acc = acc * shrink[:, None]
        maximum = top
    divisor = tl.where(sees, total, 1.0)
    out = tl.where(sees[:, None], acc * (v_scale / divisor)[:, None], 0.0)
    lse = tl.where(sees, maximum * LN2 + tl.log(divisor), float("-inf"))
    return out, lse
