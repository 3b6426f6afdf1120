"""Prefill and mixed attention: a program owns a tile of query tokens of one request and one kv head.

The grid comes from shapes; each program finds its request on the device from ``query_start_loc``, so that
prefill, chunked prefill and decodes share one launch; with SKIP_DECODES short queries are left to the decode
kernel. The rows of a tile are query tokens x heads of the group: a tile of keys is read once for all of them.
Key tiles that every row sees whole take a loop without masks; only the tiles at the ends of the rows'
intervals are masked. No loop may go around these: what stays alive across it costs the copies their registers
(docs/log/mixed.md). Programs start with the last tokens, which see the most keys, so that short tiles fill
the end.

Shaped for Hopper: wgmma takes q, k and v from shared memory and p from registers, k and v arrive by cp.async.
Warps are ordered by
Triton's own barriers alone: one placed by hand would depend on where the compiler puts its own
(docs/log/prefill_triton.md, tests/support/ptx.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchpaged.custom_ops.attention.triton.attend import (
    beside,
    capped,
    converted,
    finish,
    keys_of,
    load_sinks,
    load_slopes,
    query_rows,
    seen_by,
    sloped,
    slot_offset,
)
from torchpaged.custom_ops.attention.triton.block_sparse import ordinals, path_of, place, sees_block
from torchpaged.custom_ops.attention.triton.decode import store_padding
from torchpaged.custom_ops.triton.interpreter import INTERPRET, as_numbers
from torchpaged.custom_ops.triton.records import Batch
from torchpaged.custom_ops.triton.results import store_rows


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


class KeyRanges(NamedTuple):
    """Of a work tile: every valid row sees all of ``[whole_first, whole_end)``, multiples of a tile's keys;
    some see more from ``first_key`` on, a multiple likewise."""

    first_key: Any
    whole_first: Any
    whole_end: Any


@triton.jit
def find_request(starts_ptr, tile, num_reqs, TOKENS: tl.constexpr):
    """The request that query tile ``tile`` belongs to: request r's tiles begin at ``starts[r] // TOKENS +
    r``.

    Counts the requests that begin at or before ``tile``: one round of loads where bisection would wait for
    seven in a row.
    """
    LANES: tl.constexpr = 128
    count = 0
    for first in range(0, num_reqs, LANES):
        request = first + tl.arange(0, LANES)
        begin = (
            tl.load(starts_ptr + request, mask=request < num_reqs, other=0, cache_modifier=".cg") // TOKENS
            + request
        )
        count += tl.sum(((begin <= tile) & (request < num_reqs)).to(tl.int32), 0)
    return count - 1


@triton.jit
def tiles_of_longer(starts_ptr, first, num_reqs, TOKENS: tl.constexpr, SKIPPED: tl.constexpr):
    """Query tiles of the requests ``first + [0, 32)``; those of at most SKIPPED tokens have none.

    As many as a warp has threads: sums over them need no barrier, and their results are known to be the same
    in all threads.
    """
    request = first + tl.arange(0, 32)
    start = tl.load(starts_ptr + request, mask=request < num_reqs, other=0, cache_modifier=".cg")
    query_len = (
        tl.load(starts_ptr + request + 1, mask=request < num_reqs, other=0, cache_modifier=".cg") - start
    )
    return tl.where(query_len > SKIPPED, (query_len + TOKENS - 1) // TOKENS, 0)


@triton.jit
def count_longer_tiles(starts_ptr, num_reqs, TOKENS: tl.constexpr, SKIPPED: tl.constexpr):
    """All query tiles of requests of more than SKIPPED tokens. A sum alone: what a program without a tile
    spends its time on."""
    tiles = tl.zeros([32], tl.int32)
    for first in tl.range(0, num_reqs, 32, loop_unroll_factor=4):
        tiles += tiles_of_longer(starts_ptr, first, num_reqs, TOKENS, SKIPPED)
    return tl.sum(tiles, 0)


@triton.jit
def find_longer_request(starts_ptr, tile, num_reqs, TOKENS: tl.constexpr, SKIPPED: tl.constexpr):
    """``(request, its first tile)`` of query tile ``tile``, counting requests of more than SKIPPED
    tokens only."""
    before = 0
    found = tl.zeros([32], tl.int32)
    found_first = tl.zeros([32], tl.int32)
    for first in tl.range(0, num_reqs, 32, loop_unroll_factor=4):
        tiles = tiles_of_longer(starts_ptr, first, num_reqs, TOKENS, SKIPPED)
        first_tile = before + tl.cumsum(tiles, 0) - tiles
        mine = (first_tile <= tile) & (tile < first_tile + tiles)  # of one lane in one round
        found = tl.where(mine, first + tl.arange(0, 32), found)
        found_first = tl.where(mine, first_tile, found_first)
        before += tl.sum(tiles, 0)
    return tl.sum(found, 0), tl.sum(found_first, 0)


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
    # tiles may hold keys that no row sees, whose values may be NaN
    HOLES: tl.constexpr = SPEC.block_sparse is not None and TILING.verticals == 0
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
        if HOLES:
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


@triton.jit
def key_ranges(rows, low_key, end_key, LOW: tl.constexpr, SPEC: tl.constexpr, TILE_KV: tl.constexpr):
    """The `KeyRanges` of rows that see keys in ``[low_key, end_key)``. LOW: they may not see the first."""
    first_key = low_key // TILE_KV * TILE_KV
    whole_end = tl.min(tl.where(rows.valid, rows.end, 2147483647), 0) // TILE_KV * TILE_KV
    if SPEC.tree:
        whole_end = tl.minimum(whole_end, tl.maximum(rows.context, 0) // TILE_KV * TILE_KV)
    whole_first = first_key
    if LOW:
        whole_first = (tl.max(tl.where(rows.valid, rows.low, 0), 0) + TILE_KV - 1) // TILE_KV * TILE_KV
        whole_first = tl.minimum(whole_first, (end_key + TILE_KV - 1) // TILE_KV * TILE_KV)
    return KeyRanges(first_key, whole_first, tl.maximum(whole_end, whole_first))


@triton.jit
def attend_keys(
    tile,
    ranges,
    sees,
    SPEC: tl.constexpr,
    TILING: tl.constexpr,
    TILE_KV: tl.constexpr,
    ALL_MASKED: tl.constexpr,
):
    """The softmax state of a work tile over its keys; ``sees [M]``: rows that see some. ALL_MASKED: as in
    `attend_query_tile`."""
    FOLD: tl.constexpr = not (SPEC.soft_cap or SPEC.alibi)
    LOW: tl.constexpr = SPEC.window_left >= 0 or SPEC.chunk_size > 0
    # With a cap or slopes one loop takes the masked keys of both ends, since each copy of it takes long to
    # compile. Without, a copy is compiled soon, and three loops ran on fewer instructions than two.
    ENDS_TOGETHER: tl.constexpr = LOW and not FOLD and not ALL_MASKED
    TILE_M: tl.constexpr = TILING.tile_m
    DIM_V_PAD: tl.constexpr = TILING.dim_v_pad
    first_key, whole_first, whole_end = ranges.first_key, ranges.whole_first, ranges.whole_end
    BLOCK_SIZE: tl.constexpr = SPEC.block_size
    table, end_key = tile.keys.table, tile.end_key
    # Finite for rows that see a key, so that one that has seen none yet makes no inf - inf. That of the
    # others stays -inf: it says so at the end, where a mask kept alive across the loops would cost registers.
    maximum = tl.where(sees, -1.0e30, float("-inf"))
    state = maximum, tl.zeros([TILE_M], tl.float32), tl.zeros([TILE_M, DIM_V_PAD], tl.float32)
    masked_first, gap = whole_end, 0
    if ALL_MASKED or ENDS_TOGETHER:
        masked_first = first_key
    if ENDS_TOGETHER:
        gap = (whole_end - whole_first) // TILE_KV * TILE_KV  # so the compiler sees what divides it
    if not ALL_MASKED:
        blocks = load_blocks(table, whole_first if ENDS_TOGETHER else first_key, end_key, TILE_KV, BLOCK_SIZE)
        if LOW and not ENDS_TOGETHER:
            state, blocks = mainloop(
                state, blocks, tile, first_key, whole_first, 0, 0, SPEC, TILING, TILE_KV, MASKED=True
            )
        state, blocks = mainloop(
            state, blocks, tile, whole_first, whole_end, 0, 0, SPEC, TILING, TILE_KV, MASKED=False
        )
    if ENDS_TOGETHER:
        after_gap = first_key + tl.where(first_key >= whole_first, gap, 0)
        blocks = load_blocks(table, after_gap, end_key, TILE_KV, BLOCK_SIZE)
    elif ALL_MASKED or (TILE_KV % BLOCK_SIZE == 0 and BLOCK_SIZE < TILE_KV):
        # `mainloop` has not looked past its whole tiles
        blocks = load_blocks(table, masked_first, end_key, TILE_KV, BLOCK_SIZE)
    state, blocks = mainloop(
        state,
        blocks,
        tile,
        masked_first,
        end_key - gap,
        whole_first,
        gap,
        SPEC,
        TILING,
        TILE_KV,
        MASKED=True,
        GAP=ENDS_TOGETHER,
        STAGES=1 if ALL_MASKED else None,
    )
    return state


@triton.jit
def attend_blocks(
    tile,
    whole_end,
    sees,
    SPEC: tl.constexpr,
    TILING: tl.constexpr,
    TILE_KV: tl.constexpr,
    ALL_MASKED: tl.constexpr,
):
    """`attend_keys` of a mask that hides blocks, over the tiles that are seen. Where no other mask hides the
    first keys, a row sees all of a tile or nothing up to ``whole_end``: masks by key are for those behind."""
    LOW: tl.constexpr = SPEC.window_left >= 0 or SPEC.chunk_size > 0
    BLOCK_SIZE: tl.constexpr = SPEC.block_size
    TILE_M: tl.constexpr = TILING.tile_m
    DIM_V_PAD: tl.constexpr = TILING.dim_v_pad
    path = tile.path
    first, last = tile.low_key // TILE_KV * TILE_KV, tile.end_key
    if TILING.verticals > 0:
        first, last = ordinals(tile.low_key, tile.end_key, path.slash, path.verticals, SPEC, TILING)
    maximum = tl.where(sees, -1.0e30, float("-inf"))  # as in attend_keys
    state = maximum, tl.zeros([TILE_M], tl.float32), tl.zeros([TILE_M, DIM_V_PAD], tl.float32)
    at = place(first, path, SPEC, TILING)
    blocks = load_blocks(tile.keys.table, at, tile.end_key, TILE_KV, BLOCK_SIZE)
    if TILING.verticals > 0 and not LOW and not ALL_MASKED:
        hidden = (path.slash - path.verticals) * SPEC.block_sparse.block_size
        whole_end = tl.maximum(whole_end - hidden, first) // TILE_KV * TILE_KV
        state, blocks = mainloop(
            state, blocks, tile, first, whole_end, 0, 0, SPEC, TILING, TILE_KV, MASKED=False
        )
        first = whole_end
    STAGES: tl.constexpr = 1 if ALL_MASKED else None
    state, blocks = mainloop(
        state, blocks, tile, first, last, 0, 0, SPEC, TILING, TILE_KV, MASKED=True, STAGES=STAGES
    )
    return state


@triton.jit
def attend_query_tile(
    request,
    start,
    query_len,
    first_query,
    kv_head,
    inputs,
    batch,
    results,
    SPEC: tl.constexpr,
    TILING: tl.constexpr,
    TILE_KV: tl.constexpr,
    ALL_MASKED: tl.constexpr,
):
    """Attend and store the query tokens of a tile, ``first_query ...`` of a request whose token rows begin at
    ``start``.

    ALL_MASKED: one loop, with masks, over all keys: with a cap or slopes each copy of the loop costs a second
    and more to compile.
    """
    # Scales are positive: the largest raw score is the largest score, and the scale goes into the exponents.
    FOLD: tl.constexpr = not (SPEC.soft_cap or SPEC.alibi)
    LOW: tl.constexpr = SPEC.window_left >= 0 or SPEC.chunk_size > 0
    row = tl.arange(0, TILING.tile_m)
    head = kv_head * SPEC.group + row % SPEC.group
    seq_len = tl.load(batch.seq_lens + request)
    query = first_query + row // SPEC.group
    valid = (query < query_len) & (row < TILING.tokens * SPEC.group)
    d = tl.arange(0, TILING.dim_pad)
    q_row = (start + query).to(tl.int64) * inputs.q_token + head.to(tl.int64) * inputs.q_head
    # [M, D]; untouched, it stays in shared memory
    q = tl.load(
        inputs.q + q_row[:, None] + d[None, :], mask=valid[:, None] & (d < SPEC.dim)[None, :], other=0.0
    )
    rows = query_rows(inputs, start, query, head, query_len, seq_len, valid, SPEC)
    sees = rows.end > rows.low
    end_key = tl.max(tl.where(sees, rows.end, 0), 0)
    low_key = tl.minimum(tl.min(tl.where(sees, rows.low, 2147483647), 0), end_key)
    ranges = key_ranges(rows, low_key, end_key, LOW, SPEC, TILE_KV)
    slope = load_slopes(inputs, head, valid, SPEC)
    score_scale = inputs.scale
    if SPEC.scales:
        score_scale = inputs.scale * tl.load(inputs.k_scale + kv_head * inputs.ks_head)
    first_position = seq_len - query_len + first_query
    path = path_of(first_position, kv_head, end_key, SPEC, TILING, OWN=True)
    keys = keys_of(inputs, batch, request, kv_head, inputs.k_head, inputs.v_head)
    tile = QueryTile(as_numbers(q), rows, slope, keys, score_scale, inputs.soft_cap, low_key, end_key, path)
    if SPEC.block_sparse is not None:
        maximum, total, acc = attend_blocks(tile, ranges.whole_end, sees, SPEC, TILING, TILE_KV, ALL_MASKED)
    else:
        maximum, total, acc = attend_keys(tile, ranges, sees, SPEC, TILING, TILE_KV, ALL_MASKED)
    # What only the end needs is read again, not kept: across the loops it cost spills, or the copies their
    # registers (docs/log/mixed.md). Volatile, or the compiler would keep the first reading; it comes from L2,
    # as the first did.
    start = tl.load(batch.starts + request, volatile=True)
    query_len = tl.load(batch.starts + request + 1, volatile=True) - start
    query = first_query + row // SPEC.group
    valid = (query < query_len) & (row < TILING.tokens * SPEC.group)
    sink = load_sinks(inputs, head, valid, SPEC)
    v_scale = 1.0
    if SPEC.scales:
        v_scale = tl.load(inputs.v_scale + kv_head * inputs.vs_head)
    LOG2E: tl.constexpr = 1.4426950408889634
    maximum *= score_scale * LOG2E if FOLD else LOG2E
    out, lse = finish(maximum, total, acc, sink, v_scale, maximum != float("-inf"), SPEC.sinks)
    store_rows(results, out, lse, start + query, head, valid, SPEC.dim_v, TILING.dim_v_pad)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "num_single", "num_sms"])  # one for all batch sizes
def prefill_kernel(
    num_reqs,
    num_tokens,
    num_single,
    num_sms,
    num_kv_heads,
    batch,
    inputs,
    results,
    SPEC: tl.constexpr,
    TILING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Arguments: `PrefillArguments`. Grid: (tiles * num_kv_heads,); tiles: num_tokens // tokens + num_reqs.

    ``TILING.skip_decodes``: requests with at most so many query tokens are neither read nor written: a launch
        of the decode kernel takes them.
    Any number of tiles will do then: ``num_single`` of them are one each, as most batches have it; tiles past
    those, of many short queries, are shared out over the other programs, of which there must be one per kv
    head or more if shapes allow such tiles; these take half as many keys at a time.
    0: none is skipped. Programs without a tile come last, where they are no tile's hindrance, as long as
    ``num_sms`` multiprocessors hold all that have one; first, while the device is full anyway, where they
    don't: the decode launch begins when all have begun. PDL: the next kernel may be launched once all
    programs of this one have begun and the kernels before have finished. The decode launch relies on the
    latter and does not wait: programs without a tile, too, must not end before.
    """
    TOKENS: tl.constexpr = TILING.tokens
    SKIPPED: tl.constexpr = TILING.skip_decodes
    batch = Batch(batch.table, batch.seq_lens, batch.starts, num_reqs, num_tokens, batch.table_row)
    programs = tl.num_programs(0) // num_kv_heads
    program = tl.program_id(0) // num_kv_heads
    kv_head = tl.program_id(0) % num_kv_heads
    tile = programs - 1 - program
    request, first_tile, num_tiles, exists = 0, 0, 0, True
    if SKIPPED > 0:
        num_tiles = count_longer_tiles(batch.starts, num_reqs, TOKENS, SKIPPED)
        if num_tiles * num_kv_heads <= num_sms:
            tile = program
        exists = tile < min(num_tiles, num_single)
        if exists:
            request, first_tile = find_longer_request(batch.starts, tile, num_reqs, TOKENS, SKIPPED)
    else:
        request = find_request(batch.starts, tile, num_reqs, TOKENS)
        first_tile = tl.load(batch.starts + request, cache_modifier=".cg") // TOKENS + request
    start = tl.load(batch.starts + request, cache_modifier=".cg")
    query_len = tl.load(batch.starts + request + 1, cache_modifier=".cg") - start
    first_query = (tile - first_tile) * TOKENS
    # Up to here query_start_loc alone is read, early (stream_order.py). From L2: an old line in one
    # multiprocessor's L1 would make programs, or warps of one program, disagree about their tile, and a
    # barrier that some warps never come to does not open. Everything else is read behind the wait.
    # Every program waits here for all kernels ahead, and then lets its dependents start: no path leads around
    # it, not even for programs without a tile, and no program waits for another or for a dependent. The
    # decode launch of a mixed batch (decode.py) relies on the order of both.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if exists & (first_query < query_len):
        attend_query_tile(
            request=request,
            start=start,
            query_len=query_len,
            first_query=first_query,
            kv_head=kv_head,
            inputs=inputs,
            batch=batch,
            results=results,
            SPEC=SPEC,
            TILING=TILING,
            TILE_KV=TILING.tile_kv,
            ALL_MASKED=False,
        )
    elif SKIPPED > 0 and tile >= num_single:
        # Fewer keys at a time: with as many as above ptxas spilled, and gave all copies in here one
        # address register.
        NARROW: tl.constexpr = TILING.tile_kv if TILING.tile_kv <= 32 else TILING.tile_kv // 2
        for surplus in range(tile, num_tiles, programs - num_single):
            request, first_tile = find_longer_request(batch.starts, surplus, num_reqs, TOKENS, SKIPPED)
            start = tl.load(batch.starts + request)
            query_len = tl.load(batch.starts + request + 1) - start
            attend_query_tile(
                request=request,
                start=start,
                query_len=query_len,
                first_query=(surplus - first_tile) * TOKENS,
                kv_head=kv_head,
                inputs=inputs,
                batch=batch,
                results=results,
                SPEC=SPEC,
                TILING=TILING,
                TILE_KV=NARROW,
                ALL_MASKED=SPEC.soft_cap or SPEC.alibi,
            )
    row = tl.arange(0, TILING.tile_m)
    head, valid = kv_head * SPEC.group + row, row < SPEC.group
    store_padding(results, batch, program, programs, head, valid, TILING.tile_m, SPEC.dim_v, TILING.dim_v_pad)
