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
(docs/log/prefill_triton.md, tests/triton/ptx.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchpaged.custom_ops.attention.triton.attend import (
    Batch,
    Inputs,
    Keys,
    Spec,
    branch_position,
    branch_sees,
    finish,
    load_sinks,
    load_slopes,
    query_rows,
    slot_offset,
    tanh,
)
from torchpaged.custom_ops.attention.triton.decode import store_padding
from torchpaged.custom_ops.triton.results import Results, store_rows


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
def mainloop(
    maximum,
    total,
    acc,
    blocks,
    q,
    rows,
    slope,
    first,
    last,
    gap_at,
    gap,
    low_key,
    end_key,
    keys,
    score_scale,
    soft_cap,
    SPEC: tl.constexpr,
    TILE_KV: tl.constexpr,
    MASKED: tl.constexpr,
    GAP: tl.constexpr = False,
    STAGES: tl.constexpr = None,
):
    """Keys ``[first, last)``, ``first`` a multiple of TILE_KV. Returns the state, its first four arguments,
    after them.

    GAP: keys at and past ``gap_at`` stand for those ``gap`` further on, both multiples of TILE_KV.

    maximum, total [M], acc [M, DV]: the running softmax; blocks: `load_blocks` of the next tile, loaded one
    tile ahead, so that the loads of keys and values are pipelined like loads from plain addresses. Unless
    MASKED, every row must see every key, and with a tree all of them lie before ``context`` (`branch_sees`).
    """
    FOLD: tl.constexpr = not (SPEC.soft_cap or SPEC.alibi)  # as in attend_query_tile
    LOW: tl.constexpr = SPEC.window_left >= 0 or SPEC.chunk_size > 0
    LOG2E: tl.constexpr = 1.4426950408889634
    to_base_2 = score_scale * LOG2E if FOLD else LOG2E
    key = tl.arange(0, TILE_KV)
    d = tl.arange(0, SPEC.dim_pad)
    dv = tl.arange(0, SPEC.dim_v_pad)
    for start in tl.range(first, last, TILE_KV, num_stages=STAGES):
        following = start + TILE_KV
        if GAP:
            following += tl.where(following >= gap_at, gap, 0)
            start += tl.where(start >= gap_at, gap, 0)
        k_at = tile_of(
            keys.k, blocks, start, SPEC.k_block, SPEC.k_slot, SPEC.dim_pad, TILE_KV, SPEC.block_size
        )
        v_at = tile_of(
            keys.v, blocks, start, SPEC.v_block, SPEC.v_slot, SPEC.dim_v_pad, TILE_KV, SPEC.block_size
        )
        if MASKED:
            inside = start + key < end_key
            k = tl.load(k_at, mask=inside[:, None] & (d < SPEC.dim)[None, :], other=0.0)  # [N, D]
            # v is masked wherever p is 0 for all rows: unwritten memory may hold NaN, and 0 * NaN is not 0.
            seen = inside & (start + key >= low_key) if LOW else inside
            v = tl.load(v_at, mask=seen[:, None] & (dv < SPEC.dim_v)[None, :], other=0.0)  # [N, DV]
        else:
            k = (
                tl.load(k_at, mask=(d < SPEC.dim)[None, :], other=0.0)
                if SPEC.dim < SPEC.dim_pad
                else tl.load(k_at)
            )
            v = (
                tl.load(v_at, mask=(dv < SPEC.dim_v)[None, :], other=0.0)
                if SPEC.dim_v < SPEC.dim_v_pad
                else tl.load(v_at)
            )
        if MASKED or TILE_KV % SPEC.block_size != 0 or SPEC.block_size == TILE_KV:
            blocks = load_blocks(keys.table, following, end_key, TILE_KV, SPEC.block_size)
        else:  # the last of these tiles again at the end: the next one may not be whole
            blocks = load_whole_blocks(
                keys.table, min(start + TILE_KV, last - TILE_KV), TILE_KV, SPEC.block_size
            )
        if SPEC.interpret:  # the interpreter keeps bf16 as integers: arithmetic on it is silently wrong
            k, v = k.to(tl.float32), v.to(tl.float32)
        else:
            # straight to bf16 Triton multiplies by 2^112, which makes numbers of inf and NaN
            if k.dtype == tl.float8e5:
                k, v = k.to(tl.float16), v.to(tl.float16)
            k, v = k.to(q.dtype), v.to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
        if not FOLD:
            s *= score_scale
        if SPEC.soft_cap:
            s = soft_cap * tanh(s / soft_cap)
        if SPEC.alibi:
            if SPEC.tree and MASKED:
                key_at = branch_position(rows.word[:, None], rows.context, start + key[None, :])
                s += slope[:, None] * (key_at - rows.position[:, None]).to(tl.float32)
            else:
                s += slope[:, None] * (start + key[None, :] - rows.position[:, None]).to(tl.float32)
        if MASKED:
            seen_by = (start + key[None, :] >= rows.low[:, None]) & (start + key[None, :] < rows.end[:, None])
            if SPEC.tree:
                seen_by = seen_by & branch_sees(
                    rows.word[:, None], rows.context, rows.low[:, None], start + key[None, :], LOW
                )
            s = tl.where(seen_by, s, float("-inf"))
        top = tl.maximum(maximum, tl.max(s, 1))
        p = tl.exp2(s * to_base_2 - (top * to_base_2)[:, None])
        shrink = tl.exp2((maximum - top) * to_base_2)
        total = total * shrink + tl.sum(p, 1)
        maximum = top
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return maximum, total, acc, blocks


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
    TOKENS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_KV: tl.constexpr,
    ALL_MASKED: tl.constexpr,
):
    """Attend and store the query tokens ``first_query + [0, TOKENS)`` of a request whose token rows begin
    at ``start``.

    ALL_MASKED: one loop, with masks, over all keys: with a cap or slopes each copy of the loop costs a second
    and more to compile.
    """
    # Scales are positive: the largest raw score is the largest score, and the scale goes into the exponents.
    FOLD: tl.constexpr = not (SPEC.soft_cap or SPEC.alibi)
    LOW: tl.constexpr = SPEC.window_left >= 0 or SPEC.chunk_size > 0
    # With a cap or slopes one loop takes the masked keys of both ends, since each copy of it takes long to
    # compile. Without, a copy is compiled soon, and three loops ran on fewer instructions than two.
    ENDS_TOGETHER: tl.constexpr = LOW and not FOLD and not ALL_MASKED
    row = tl.arange(0, TILE_M)
    head = kv_head * SPEC.group + row % SPEC.group
    seq_len = tl.load(batch.seq_lens + request)
    query = first_query + row // SPEC.group
    valid = (query < query_len) & (row < TOKENS * SPEC.group)
    d = tl.arange(0, SPEC.dim_pad)
    at = (
        inputs.q
        + ((start + query).to(tl.int64) * inputs.q_token + head.to(tl.int64) * inputs.q_head)[:, None]
        + d[None, :]
    )
    # [M, D]; untouched, it stays in shared memory
    q = tl.load(at, mask=valid[:, None] & (d < SPEC.dim)[None, :], other=0.0)
    if SPEC.interpret:
        q = q.to(tl.float32)
    rows = query_rows(inputs, start, query, query_len, seq_len, valid, SPEC)
    sees = rows.end > rows.low
    end_key = tl.max(tl.where(sees, rows.end, 0), 0)
    low_key = tl.minimum(tl.min(tl.where(sees, rows.low, 2147483647), 0), end_key)
    first_key = low_key // TILE_KV * TILE_KV
    # Every valid row sees all of [whole_first, whole_end), multiples of TILE_KV.
    whole_end = tl.min(tl.where(valid, rows.end, 2147483647), 0) // TILE_KV * TILE_KV
    if SPEC.tree:
        whole_end = tl.minimum(whole_end, tl.maximum(rows.context, 0) // TILE_KV * TILE_KV)
    whole_first = first_key
    if LOW:
        whole_first = (tl.max(tl.where(valid, rows.low, 0), 0) + TILE_KV - 1) // TILE_KV * TILE_KV
        whole_first = tl.minimum(whole_first, (end_key + TILE_KV - 1) // TILE_KV * TILE_KV)
    whole_end = tl.maximum(whole_end, whole_first)
    slope = load_slopes(inputs, head, valid, SPEC)
    score_scale = inputs.scale
    if SPEC.scales:
        score_scale = inputs.scale * tl.load(inputs.k_scale + kv_head * inputs.ks_head)
    keys = Keys(
        batch.table + request.to(tl.int64) * batch.table_row,
        inputs.k + kv_head.to(tl.int64) * inputs.k_head,
        inputs.v + kv_head.to(tl.int64) * inputs.v_head,
    )
    # Finite for rows that see a key, so that one that has seen none yet makes no inf - inf. That of the
    # others stays -inf: it says so at the end, where a mask kept alive across the loops would cost registers.
    maximum = tl.where(sees, -1.0e30, float("-inf"))
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, SPEC.dim_v_pad], tl.float32)
    masked_first, gap = whole_end, 0
    if ALL_MASKED or ENDS_TOGETHER:
        masked_first = first_key
    if ENDS_TOGETHER:
        gap = (whole_end - whole_first) // TILE_KV * TILE_KV  # so the compiler sees what divides it
    if not ALL_MASKED:
        blocks = load_blocks(
            keys.table, whole_first if ENDS_TOGETHER else first_key, end_key, TILE_KV, SPEC.block_size
        )
        if LOW and not ENDS_TOGETHER:
            maximum, total, acc, blocks = mainloop(
                maximum=maximum,
                total=total,
                acc=acc,
                blocks=blocks,
                q=q,
                rows=rows,
                slope=slope,
                first=first_key,
                last=whole_first,
                gap_at=0,
                gap=0,
                low_key=low_key,
                end_key=end_key,
                keys=keys,
                score_scale=score_scale,
                soft_cap=inputs.soft_cap,
                SPEC=SPEC,
                TILE_KV=TILE_KV,
                MASKED=True,
            )
        maximum, total, acc, blocks = mainloop(
            maximum=maximum,
            total=total,
            acc=acc,
            blocks=blocks,
            q=q,
            rows=rows,
            slope=slope,
            first=whole_first,
            last=whole_end,
            gap_at=0,
            gap=0,
            low_key=low_key,
            end_key=end_key,
            keys=keys,
            score_scale=score_scale,
            soft_cap=inputs.soft_cap,
            SPEC=SPEC,
            TILE_KV=TILE_KV,
            MASKED=False,
        )
    if ENDS_TOGETHER:
        blocks = load_blocks(
            keys.table,
            first_key + tl.where(first_key >= whole_first, gap, 0),
            end_key,
            TILE_KV,
            SPEC.block_size,
        )
    elif ALL_MASKED or (TILE_KV % SPEC.block_size == 0 and SPEC.block_size < TILE_KV):
        # `mainloop` has not looked past its whole tiles
        blocks = load_blocks(keys.table, masked_first, end_key, TILE_KV, SPEC.block_size)
    maximum, total, acc, blocks = mainloop(
        maximum=maximum,
        total=total,
        acc=acc,
        blocks=blocks,
        q=q,
        rows=rows,
        slope=slope,
        first=masked_first,
        last=end_key - gap,
        gap_at=whole_first,
        gap=gap,
        low_key=low_key,
        end_key=end_key,
        keys=keys,
        score_scale=score_scale,
        soft_cap=inputs.soft_cap,
        SPEC=SPEC,
        TILE_KV=TILE_KV,
        MASKED=True,
        GAP=ENDS_TOGETHER,
        STAGES=1 if ALL_MASKED else None,
    )
    # What only the end needs is read again, not kept: across the loops it cost spills, or the copies their
    # registers (docs/log/mixed.md). Volatile, or the compiler would keep the first reading; it comes from L2,
    # as the first did.
    start = tl.load(batch.starts + request, volatile=True)
    query_len = tl.load(batch.starts + request + 1, volatile=True) - start
    query = first_query + row // SPEC.group
    valid = (query < query_len) & (row < TOKENS * SPEC.group)
    sink = load_sinks(inputs, head, valid, SPEC)
    v_scale = 1.0
    if SPEC.scales:
        v_scale = tl.load(inputs.v_scale + kv_head * inputs.vs_head)
    LOG2E: tl.constexpr = 1.4426950408889634
    maximum *= score_scale * LOG2E if FOLD else LOG2E
    out, lse = finish(maximum, total, acc, sink, v_scale, maximum != float("-inf"), SPEC.sinks)
    store_rows(results, out, lse, start + query, head, valid, SPEC.dim_v, SPEC.dim_v_pad)


# one compile for all batch sizes
@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "num_single", "num_sms"])
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    seq_lens_ptr,
    starts_ptr,
    out_ptr,
    lse_ptr,
    slopes_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    tree_ptr,
    scale,
    soft_cap,
    num_reqs,
    num_tokens,
    num_kv_heads,
    num_single,
    num_sms,
    q_token,
    q_head,
    k_block: tl.constexpr,
    k_slot: tl.constexpr,
    k_head,
    v_block: tl.constexpr,
    v_slot: tl.constexpr,
    v_head,
    o_token,
    o_head,
    l_token,
    l_head,
    table_row,
    ks_head,
    vs_head,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    DIM_V: tl.constexpr,
    DIM_V_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SKIP_DECODES: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid: (tiles * num_kv_heads,). TOKENS: query tokens per tile, TOKENS * GROUP <= TILE_M; tiles:
    num_tokens // TOKENS + num_reqs.

    SKIP_DECODES: requests with at most so many query tokens are neither read nor written: a launch of the
        decode kernel takes them.
    Any number of tiles will do then: ``num_single`` of them are one each, as most batches have it; tiles past
    those, of many short queries, are shared out over the other programs, of which there must be one per kv
    head or more if shapes allow such tiles; these take half as many keys at a time.
    0: none is skipped. Programs without a tile come last, where they are no tile's hindrance, as long as
    ``num_sms`` multiprocessors hold all that have one; first, while the device is full anyway, where they
    don't: the decode launch begins when all have begun. PDL: the next kernel may be launched once all
    programs of this one have begun and the kernels before have finished. The decode launch relies on the
    latter and does not wait: programs without a tile, too, must not end before.
    """
    SPEC: tl.constexpr = Spec(
        group=GROUP,
        dim=DIM,
        dim_pad=DIM_PAD,
        dim_v=DIM_V,
        dim_v_pad=DIM_V_PAD,
        block_size=BLOCK_SIZE,
        k_block=k_block,
        k_slot=k_slot,
        v_block=v_block,
        v_slot=v_slot,
        causal=CAUSAL,
        window_left=WINDOW_LEFT,
        window_right=WINDOW_RIGHT,
        chunk_size=CHUNK,
        soft_cap=SOFT_CAP,
        alibi=slopes_ptr is not None,
        sinks=sinks_ptr is not None,
        scales=k_scale_ptr is not None,
        tree=tree_ptr is not None,
        interpret=INTERPRET,
    )
    batch = Batch(table_ptr, seq_lens_ptr, starts_ptr, num_reqs, num_tokens, table_row)
    inputs = Inputs(
        q=q_ptr,
        k=k_ptr,
        v=v_ptr,
        slopes=slopes_ptr,
        sinks=sinks_ptr,
        k_scale=k_scale_ptr,
        v_scale=v_scale_ptr,
        tree=tree_ptr,
        scale=scale,
        soft_cap=soft_cap,
        q_token=q_token,
        q_head=q_head,
        k_head=k_head,
        v_head=v_head,
        ks_head=ks_head,
        vs_head=vs_head,
    )
    results = Results(out_ptr, lse_ptr, o_token, o_head, l_token, l_head)
    programs = tl.num_programs(0) // num_kv_heads
    program = tl.program_id(0) // num_kv_heads
    kv_head = tl.program_id(0) % num_kv_heads
    tile = programs - 1 - program
    request, first_tile, num_tiles, exists = 0, 0, 0, True
    if SKIP_DECODES > 0:
        num_tiles = count_longer_tiles(starts_ptr, num_reqs, TOKENS, SKIP_DECODES)
        if num_tiles * num_kv_heads <= num_sms:
            tile = program
        exists = tile < min(num_tiles, num_single)
        if exists:
            request, first_tile = find_longer_request(starts_ptr, tile, num_reqs, TOKENS, SKIP_DECODES)
    else:
        request = find_request(starts_ptr, tile, num_reqs, TOKENS)
        first_tile = tl.load(starts_ptr + request, cache_modifier=".cg") // TOKENS + request
    start = tl.load(starts_ptr + request, cache_modifier=".cg")
    query_len = tl.load(starts_ptr + request + 1, cache_modifier=".cg") - start
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
            TOKENS=TOKENS,
            TILE_M=TILE_M,
            TILE_KV=TILE_KV,
            ALL_MASKED=False,
        )
    elif SKIP_DECODES > 0 and tile >= num_single:
        # Fewer keys at a time: with as many as above ptxas spilled, and gave all copies in here one
        # address register.
        NARROW: tl.constexpr = TILE_KV if TILE_KV <= 32 else TILE_KV // 2
        for surplus in range(tile, num_tiles, programs - num_single):
            request, first_tile = find_longer_request(starts_ptr, surplus, num_reqs, TOKENS, SKIP_DECODES)
            start = tl.load(starts_ptr + request)
            query_len = tl.load(starts_ptr + request + 1) - start
            first_query = (surplus - first_tile) * TOKENS
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
                TOKENS=TOKENS,
                TILE_M=TILE_M,
                TILE_KV=NARROW,
                ALL_MASKED=SPEC.soft_cap or SPEC.alibi,
            )
    row = tl.arange(0, TILE_M)
    head = kv_head * GROUP + row
    store_padding(results, batch, program, programs, head, row < GROUP, TILE_M, SPEC)
