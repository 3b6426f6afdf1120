"""The prefill kernel's mainloop: a tile of query rows against tiles of paged keys. Legend and ``SPEC``: as in
attend.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchpaged.custom_ops.attention.triton.attend import converted, slot_offset
from torchpaged.custom_ops.attention.triton.block_sparse import place, sees_block
from torchpaged.custom_ops.attention.triton.rows import beside, capped, seen_by, sloped
from torchpaged.custom_ops.triton.interpreter import INTERPRET


class QueryTile(NamedTuple):
    """A work tile: queries of one request, and what is attended by them.

    Attributes:
        q: ``[M, D]``.
        rows, keys: `Rows`, `Keys`.
        score_scale: softmax scale times the cache's k_scale.
        low_key, end_key: between them are the keys that some row sees.
        path: where their tiles are.
    """

    q: Any
    rows: Any
    slope: Any
    keys: Any
    score_scale: Any
    soft_cap: Any
    low_key: Any
    end_key: Any
    path: Any


@triton.jit
def load_blocks(table_ptr, start, end_key, TILE_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Block ids of the keys ``start + [0, TILE_KV)``, one number if a block holds them all; 0, the null
    block, at and past ``end_key``."""
    if BLOCK_SIZE % TILE_KV == 0:
        blocks = tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end_key, other=0)
    else:
        n = tl.arange(0, TILE_KV)
        # start is a multiple of TILE_KV: the division of n leaves the loop
        at = start // BLOCK_SIZE + n // BLOCK_SIZE
        if TILE_KV % BLOCK_SIZE != 0:
            at = (start + n) // BLOCK_SIZE
        blocks = tl.load(table_ptr + at, mask=n < end_key - start, other=0)
    return blocks


@triton.jit
def load_whole_blocks(table_ptr, start, TILE_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """`load_blocks` of a tile of which every key exists and that holds several whole blocks: without a mask
    per id."""
    COUNT: tl.constexpr = TILE_KV // BLOCK_SIZE
    ids = tl.load(table_ptr + start // BLOCK_SIZE + tl.arange(0, COUNT))
    return tl.reshape(tl.broadcast_to(ids[:, None], [COUNT, BLOCK_SIZE]), [TILE_KV])


@triton.jit
def tile_of(
    cache_ptr,
    blocks,
    start,
    stride_block: tl.constexpr,
    stride_slot: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Addresses ``[N, WIDTH]`` of the keys ``start + [0, TILE_KV)``. Constant strides make it two
    instructions per row."""
    key = tl.arange(0, TILE_KV)
    d = tl.arange(0, WIDTH)[None, :]
    if BLOCK_SIZE % TILE_KV == 0:
        at = cache_ptr + (
            blocks.to(tl.int64) * stride_block + slot_offset(start % BLOCK_SIZE, stride_slot, BLOCK_SIZE)
        )
        at += slot_offset(key, stride_slot, BLOCK_SIZE)[:, None] + d
    else:
        offset = key % BLOCK_SIZE if TILE_KV % BLOCK_SIZE == 0 else (start + key) % BLOCK_SIZE
        at = (
            cache_ptr
            + (slot_offset(offset, stride_slot, BLOCK_SIZE)[:, None] + d)
            + (blocks.to(tl.int64) * stride_block)[:, None]
        )
    return at


@triton.jit
def load_tile(at, inside, WIDTH: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """``[N, PAD]`` of keys or values; zeros in columns past WIDTH and, if MASKED, of keys not ``inside``."""
    d = tl.arange(0, PAD)
    if MASKED:
        x = tl.load(at, mask=inside[:, None] & (d < WIDTH)[None, :], other=0.0)
    elif WIDTH < PAD:
        x = tl.load(at, mask=(d < WIDTH)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def mainloop(
    state,
    blocks,
    tile,
    first,
    last,
    gap_at,
    gap,
    SPEC: tl.constexpr,
    TILING: tl.constexpr,
    TILE_KV: tl.constexpr,
    MASKED: tl.constexpr,
    GAP: tl.constexpr = False,
    STAGES: tl.constexpr = None,
):
    """Keys ``[first, last)``, ``first`` a multiple of TILE_KV. Returns ``state`` and ``blocks`` after them.

    ``first``, ``last``: ordinals (`place`). GAP: keys at and past ``gap_at`` stand for those ``gap`` further
    on, both multiples of TILE_KV.

    state: maximum, total [M], acc [M, DV], the running softmax; blocks: `load_blocks` of the next tile,
    loaded one tile ahead, so that the loads of keys and values are pipelined like loads from plain addresses.
    Unless MASKED, every row must see every key, or of a mask that hides blocks all of a tile or nothing, and
    with a tree all lie before ``context`` (`branch_sees`).
    """
    FOLD: tl.constexpr = not (SPEC.soft_cap or SPEC.alibi)  # as in attend_query_tile
    LOW: tl.constexpr = SPEC.window_left >= 0 or SPEC.chunk_size > 0
    LOG2E: tl.constexpr = 1.4426950408889634
    maximum, total, acc = state
    keys, rows = tile.keys, tile.rows
    to_base_2 = tile.score_scale * LOG2E if FOLD else LOG2E
    BLOCK_SIZE: tl.constexpr = SPEC.block_size
    k_block: tl.constexpr = SPEC.k_strides[0]
    k_slot: tl.constexpr = SPEC.k_strides[1]
    v_block: tl.constexpr = SPEC.v_strides[0]
    v_slot: tl.constexpr = SPEC.v_strides[1]
    key = tl.arange(0, TILE_KV)
    slope, column = tile.slope[:, None], beside(rows, 1)
    for start in tl.range(first, last, TILE_KV, num_stages=STAGES):
        following = start + TILE_KV
        if GAP:
            following += tl.where(following >= gap_at, gap, 0)
            start += tl.where(start >= gap_at, gap, 0)
        following = place(following, tile.path, SPEC, TILING)
        start = place(start, tile.path, SPEC, TILING)
        k_at = tile_of(keys.k, blocks, start, k_block, k_slot, TILING.dim_pad, TILE_KV, BLOCK_SIZE)
        v_at = tile_of(keys.v, blocks, start, v_block, v_slot, TILING.dim_v_pad, TILE_KV, BLOCK_SIZE)
        inside = start + key < tile.end_key
        k = load_tile(k_at, inside, SPEC.dim, TILING.dim_pad, MASKED)  # [N, D]
        # v is masked wherever p is 0 for all rows: unwritten memory may hold NaN, and 0 * NaN is not 0.
        seen = inside & (start + key >= tile.low_key) if LOW else inside
        n = start + key[None, :]
        if TILING.holes:
            seen = seen & (tl.max(seen_by(n, column, LOW, SPEC).to(tl.int32), 0) > 0)
        v = load_tile(v_at, seen, SPEC.dim_v, TILING.dim_v_pad, MASKED)  # [N, DV]
        if MASKED or TILE_KV % BLOCK_SIZE != 0 or BLOCK_SIZE == TILE_KV or SPEC.block_sparse is not None:
            blocks = load_blocks(keys.table, following, tile.end_key, TILE_KV, BLOCK_SIZE)
        else:  # the last of these tiles again at the end: the next one may not be whole
            blocks = load_whole_blocks(keys.table, min(start + TILE_KV, last - TILE_KV), TILE_KV, BLOCK_SIZE)
        # straight to bf16 Triton multiplies by 2^112, which makes numbers of inf and NaN
        if k.dtype == tl.float8e5 and not INTERPRET:
            k, v = k.to(tl.float16), v.to(tl.float16)
        k, v = converted(k, tile.q.dtype), converted(v, tile.q.dtype)
        s = tl.dot(tile.q, tl.trans(k), input_precision="ieee")  # [M, N]
        if not FOLD:
            s *= tile.score_scale
        s = capped(s, tile.soft_cap, SPEC)
        s = sloped(s, n, slope, column, SPEC.tree and MASKED, SPEC)
        if MASKED:
            visible = seen_by(n, column, LOW, SPEC, start if TILING.verticals > 0 else None)
            s = tl.where(visible, s, float("-inf"))
        elif SPEC.block_sparse is not None:
            s = tl.where(sees_block(column, start, SPEC), s, float("-inf"))
        top = tl.maximum(maximum, tl.max(s, 1))
        p = tl.exp2(s * to_base_2 - (top * to_base_2)[:, None])
        shrink = tl.exp2((maximum - top) * to_base_2)
        total = total * shrink + tl.sum(p, 1)
        maximum = top
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return (maximum, total, acc), blocks
