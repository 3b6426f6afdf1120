"""Prefill and mixed attention: a program owns a tile of query tokens of one request and one kv head.

The grid comes from shapes; each program finds its request on the device from ``query_start_loc``, so that
prefill, chunked prefill and decodes share one launch; with SKIP_DECODES short queries are left to the decode
kernel. The rows of a tile are query tokens x heads of the group: a tile of keys is read once for all of them.
Under a mask that hides other blocks from each query head they are of one query head (`PrefillTiling`).
Key tiles that every row sees whole take a loop without masks; only the tiles at the ends of the rows'
intervals are masked. No loop may go around these: what stays alive across it costs the copies their registers
(docs/log/mixed.md). Programs start with the last tokens, which see the most keys, so that short tiles fill
the end.

Shaped for Hopper: wgmma takes q, k and v from shared memory and p from registers, k and v arrive by cp.async.
Warps are ordered by Triton's own barriers alone: one placed by hand would depend on where the compiler puts
its own (docs/log/prefill_triton.md, tests/support/ptx.py).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchpaged.custom_ops.attention.triton.attend import finish, keys_of, load_sinks, load_slopes
from torchpaged.custom_ops.attention.triton.block_sparse import ordinals, path_of, place
from torchpaged.custom_ops.attention.triton.decode import store_padding
from torchpaged.custom_ops.attention.triton.prefill_loop import QueryTile, load_blocks, mainloop
from torchpaged.custom_ops.attention.triton.prefill_requests import (
    count_longer_tiles,
    find_longer_request,
    find_request,
)
from torchpaged.custom_ops.attention.triton.rows import query_rows
from torchpaged.custom_ops.triton.interpreter import as_numbers
from torchpaged.custom_ops.triton.records import Batch
from torchpaged.custom_ops.triton.results import store_rows


class KeyRanges(NamedTuple):
    """Of a work tile: every valid row sees all of ``[whole_first, whole_end)``, multiples of a tile's keys;
    some see more from ``first_key`` on, a multiple likewise."""

    first_key: Any
    whole_first: Any
    whole_end: Any


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
        score_scale = inputs.scale * tl.load(inputs.k_scale + kv_head // TILING.sharing * inputs.ks_head)
    first_position = seq_len - query_len + first_query
    path = path_of(first_position, kv_head, end_key, SPEC, TILING, OWN=True)
    keys = keys_of(inputs, batch, request, kv_head // TILING.sharing, inputs.k_head, inputs.v_head)
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
        v_scale = tl.load(inputs.v_scale + kv_head // TILING.sharing * inputs.vs_head)
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
    # Up to here query_start_loc alone is read, early (docs/stream_order.md). From L2: an old line in one
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
