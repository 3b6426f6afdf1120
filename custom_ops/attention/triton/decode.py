"""Decode attention: stream-K over (request, kv head, key tile) on a fixed grid, merged in the same launch.

The keys of all requests and kv heads are cut into tiles and lined up; every program takes an equal run of
that line, whatever the lengths are. A run that ends inside a (request, kv head) pair leaves a partial result
in scratch memory; the last program to arrive at a pair merges its parts in a fixed order, so that replays
agree bit for bit, and sets the pair's semaphore back to 0. Each program finds its run by a scan of
``seq_lens``: there is no list that could be stale, and nothing reads a length on the host. Sources: Stream-K
(arXiv:2301.03598), split-KV merging (arXiv:2501.01005, section 2.2).

The query heads of a kv head times the query tokens are the rows of one dot, padded to 16 (the least
of mma.sync).
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchpaged.custom_ops.attention.triton.attend import (
    attend,
    attend_slices,
    branch_of,
    finish,
    merge_slices,
    slice_blocks,
    visible_range,
)
from torchpaged.custom_ops.triton.cache_writes import fence


@triton.jit
def store_rows(
    out_ptr,
    lse_ptr,
    out,
    lse,
    token,
    head,
    valid,
    o_token,
    o_head,
    l_token,
    l_head,
    DIM_V: tl.constexpr,
    DIM_V_PAD: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Write ``out [M, DV]`` and ``lse [M]`` of rows (token, head)."""
    dv = tl.arange(0, DIM_V_PAD)
    head = head.to(tl.int64)  # as the query's heads: a head's stride may be that of a whole sequence
    at = out_ptr + (token.to(tl.int64) * o_token + head * o_head)[:, None] + dv[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (dv < DIM_V)[None, :])
    if HAS_LSE:
        tl.store(lse_ptr + token.to(tl.int64) * l_token + head * l_head, lse, mask=valid)


@triton.jit
def store_padding(
    out_ptr,
    lse_ptr,
    starts_ptr,
    first,
    step,
    num_reqs,
    num_tokens,
    head,
    valid,
    o_token,
    o_head,
    l_token,
    l_head,
    TILE_M: tl.constexpr,
    DIM_V: tl.constexpr,
    DIM_V_PAD: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Token rows after the last request's: zeros and -inf, shared out over the programs."""
    used = tl.load(starts_ptr + num_reqs)
    zero = tl.zeros([TILE_M, DIM_V_PAD], tl.float32)
    nothing = tl.full([TILE_M], float("-inf"), tl.float32)
    for token in range(used + first, num_tokens, step):
        rows = tl.zeros([TILE_M], tl.int32) + token
        store_rows(
            out_ptr=out_ptr,
            lse_ptr=lse_ptr,
            out=zero,
            lse=nothing,
            token=rows,
            head=head,
            valid=valid,
            o_token=o_token,
            o_head=o_head,
            l_token=l_token,
            l_head=l_head,
            DIM_V=DIM_V,
            DIM_V_PAD=DIM_V_PAD,
            HAS_LSE=HAS_LSE,
        )


@triton.jit
def key_range(
    seq_len,
    query_len,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    TILE_KV: tl.constexpr,
):
    """``(first tile, end key)`` of what any query of a request sees; end 0 if none. Both bounds grow with
    the position."""
    last = seq_len - 1
    low, _ = visible_range(
        tl.maximum(seq_len - query_len, 0), seq_len, WINDOW_LEFT, WINDOW_RIGHT, CHUNK, CAUSAL
    )
    _, end = visible_range(last, seq_len, WINDOW_LEFT, WINDOW_RIGHT, CHUNK, CAUSAL)
    end = tl.where((query_len > 0) & (last >= 0), tl.minimum(end, seq_len), 0)
    return tl.where(end > low, low // TILE_KV, 0), tl.where(end > low, end, 0)


@triton.jit
def scan_tiles(
    seq_lens_ptr,
    starts_ptr,
    first_req,
    num_reqs,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    TILE_KV: tl.constexpr,
    REQS: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Key tiles of requests ``first_req ... first_req + REQS``: ``[REQS]``, 0 for those that see nothing or
    are not ours."""
    request = first_req + tl.arange(0, REQS)
    inside = request < num_reqs
    seq_len = tl.load(seq_lens_ptr + request, mask=inside, other=0)
    start = tl.load(starts_ptr + request, mask=inside, other=0)
    query_len = tl.load(starts_ptr + request + 1, mask=inside, other=0) - start
    if LONGEST > 0:
        query_len = tl.where(query_len > LONGEST, 0, query_len)
    first, end = key_range(seq_len, query_len, WINDOW_LEFT, WINDOW_RIGHT, CHUNK, CAUSAL, TILE_KV)
    return (end + TILE_KV - 1) // TILE_KV - first


@triton.jit
def divide(a, b):
    """``a // b`` of numbers that are not negative: half the instructions of the division of signed ones."""
    return (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)


@triton.jit
def run_start(program, total, programs):
    """``program * total // programs`` in 32 bits: first unit of the program's run."""
    base = divide(total, programs)
    return program * base + divide(program * (total - base * programs), programs)


@triton.jit
def owner(unit, total, programs):
    """The program whose run holds ``unit``: a guess that is off by one at most, put right."""
    guess = ((unit + 1).to(tl.float32) * programs / total).to(tl.int32)
    guess += (run_start(guess + 1, total, programs) <= unit).to(tl.int32)
    return guess - (run_start(guess, total, programs) > unit).to(tl.int32)


@triton.jit
def add_pairs(a, b, other_a, other_b):
    """For `tl.reduce`: two reductions in one pass through the threads."""
    return a + other_a, b + other_b


@triton.jit
def add_and_maximum(a, b, other_a, other_b):
    """As `add_pairs`: a sum and a maximum."""
    return a + other_a, tl.maximum(b, other_b)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "table_row"])  # one compile for all batch sizes
def decode_kernel(
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
    part_acc_ptr,
    part_state_ptr,
    semaphore_ptr,
    scale,
    soft_cap,
    num_reqs,
    num_tokens,
    q_token,
    q_head,
    o_token,
    o_head,
    l_token,
    l_head,
    table_row,
    ks_head,
    vs_head,
    K_BLOCK: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    DIM_V: tl.constexpr,
    DIM_V_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_KV: tl.constexpr,
    SLICES: tl.constexpr,
    REQS: tl.constexpr,
    ONE_SCAN: tl.constexpr,
    MIN_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    KV_SCALES: tl.constexpr,
    HAS_LSE: tl.constexpr,
    TREE: tl.constexpr,
    PDL: tl.constexpr,
    LONGEST: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid: any number of programs, the same for every length.

    K_BLOCK ... V_HEAD: strides of the caches, constants for cheap addresses. QUERY_LEN: no request has more
    query tokens. REQS: requests scanned at once (ONE_SCAN: all of them). MIN_TILES: least tiles of a run.
    ROWS: rows of a tile that are real (GROUP * QUERY_LEN padded to a power of two), PARTS: partial results
    merged at once.
    LONGEST > 0: requests with more query tokens are left to another launch, their rows untouched. That launch
    stands right before this one and neither writes what this one reads nor the other way round: only the last
    program waits for it, at its end, since what comes after this launch counts on both.
    """
    program = tl.program_id(0)
    if PDL:
        # LONGEST == 0: every program waits, then lets its dependents go (stream_order.py).
        # LONGEST > 0: nobody waits here for the prefill launch. Behind it this program begins once each of
        # its programs has let go or ended, and each waits first for all kernels ahead of it, also those that
        # find no tile: none ends before. So whatever stands ahead of both has ended, with its stores in L2,
        # when the first instruction here runs; q, lengths, tables, keys and semaphores are not written by the
        # prefill launch. What an older kernel left in this multiprocessor's L1 is not bound by that: the
        # fence drops it, for every load behind. What could turn the order round:
        # - the compiler: waits, lets and the fence are volatile assembly, which it moves across no load
        #   or store;
        # - an early exit: the prefill grid is never empty (config.most_tiles_of_longer) and leaves no path
        #   around its wait;
        # - another kernel between the two launches: paged_attention allocates and clears all it needs before
        #   the first;
        # - a lazily loaded module: loading it delays this launch, which may then find the prefill
        #   launch ended;
        # - a second stream: both launches go to one stream; a graph keeps their edge. Calls that may overlap
        #   need semaphores of their own.
        if LONGEST == 0:
            tl.extra.cuda.gdc_wait()
        else:
            fence()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, TILE_M)
    query = tl.zeros_like(row)
    head_of_group = row
    if QUERY_LEN > 1:
        query, head_of_group = row // GROUP, row % GROUP

    # The run of this program.
    tiles = scan_tiles(
        seq_lens_ptr=seq_lens_ptr,
        starts_ptr=starts_ptr,
        first_req=0,
        num_reqs=num_reqs,
        WINDOW_LEFT=WINDOW_LEFT,
        WINDOW_RIGHT=WINDOW_RIGHT,
        CHUNK=CHUNK,
        CAUSAL=CAUSAL,
        TILE_KV=TILE_KV,
        REQS=REQS,
        LONGEST=LONGEST,
    )
    total, busy = tl.reduce((tiles, (tiles > 0).to(tl.int32)), 0, add_pairs)
    if not ONE_SCAN:
        for first_req in range(REQS, num_reqs, REQS):
            more = scan_tiles(
                seq_lens_ptr=seq_lens_ptr,
                starts_ptr=starts_ptr,
                first_req=first_req,
                num_reqs=num_reqs,
                WINDOW_LEFT=WINDOW_LEFT,
                WINDOW_RIGHT=WINDOW_RIGHT,
                CHUNK=CHUNK,
                CAUSAL=CAUSAL,
                TILE_KV=TILE_KV,
                REQS=REQS,
                LONGEST=LONGEST,
            )
            more_total, more_busy = tl.reduce((more, (more > 0).to(tl.int32)), 0, add_pairs)
            total += more_total
            busy += more_busy
    total *= NUM_KV_HEADS
    used = tl.load(starts_ptr + num_reqs)  # token rows of requests; those after it are padding
    pairs = tl.maximum(busy * NUM_KV_HEADS, 1)
    wanted = tl.maximum(tl.minimum(tl.num_programs(0), total // MIN_TILES), 1)
    programs = tl.maximum(divide(wanted, pairs), 1) * pairs  # equal lengths: runs end where pairs end
    programs = tl.where((programs > wanted) | (programs * 4 < wanted * 3), wanted, programs)
    unit = run_start(program, total, programs)
    unit_end = tl.where(program < programs, run_start(program + 1, total, programs), unit)
    unwritten = (busy < num_reqs) | (used < num_tokens)  # one bit kept, not four numbers
    ends = tl.cumsum(tiles, 0) * NUM_KV_HEADS

    while unit < unit_end:
        request, before = tl.reduce(
            ((ends <= unit).to(tl.int32), tl.where(ends <= unit, ends, 0)), 0, add_and_maximum
        )
        if not ONE_SCAN:
            scanned = REQS
            while (request == scanned) & (scanned < num_reqs):
                more = scan_tiles(
                    seq_lens_ptr=seq_lens_ptr,
                    starts_ptr=starts_ptr,
                    first_req=scanned,
                    num_reqs=num_reqs,
                    WINDOW_LEFT=WINDOW_LEFT,
                    WINDOW_RIGHT=WINDOW_RIGHT,
                    CHUNK=CHUNK,
                    CAUSAL=CAUSAL,
                    TILE_KV=TILE_KV,
                    REQS=REQS,
                    LONGEST=LONGEST,
                )
                more = tl.cumsum(more, 0) * NUM_KV_HEADS + before
                request += tl.sum((more <= unit).to(tl.int32), 0)
                before = tl.maximum(before, tl.max(tl.where(more <= unit, more, 0), 0))
                scanned += REQS
        start = tl.load(starts_ptr + request)
        query_len = tl.load(starts_ptr + request + 1) - start
        seq_len = tl.load(seq_lens_ptr + request)
        first_tile, end_key = key_range(seq_len, query_len, WINDOW_LEFT, WINDOW_RIGHT, CHUNK, CAUSAL, TILE_KV)
        num_tiles = (end_key + TILE_KV - 1) // TILE_KV - first_tile
        kv_head = divide(unit - before, num_tiles)
        pair_unit = before + kv_head * num_tiles
        tile = unit - pair_unit
        count = tl.minimum(num_tiles - tile, unit_end - unit)
        first_key = (first_tile + tile) * TILE_KV

        head = kv_head * GROUP + head_of_group
        if QUERY_LEN > 1:
            valid = (query < query_len) & (query < QUERY_LEN)
        else:
            valid = row < GROUP  # a request that sees keys has its one query
        position = seq_len - query_len + query
        low, end = visible_range(position, seq_len, WINDOW_LEFT, WINDOW_RIGHT, CHUNK, CAUSAL)
        word = position
        context = seq_len - query_len
        if TREE:  # low bounds positions, of which a key's is never above its place
            word, position = branch_of(tree_ptr, start, query, context, valid)
            low, _ = visible_range(position, seq_len, WINDOW_LEFT, WINDOW_RIGHT, CHUNK, CAUSAL)
        end = tl.where(valid, end, low)
        last_key = tl.minimum(first_key + count * TILE_KV, end_key)
        table_at = table_ptr + request.to(tl.int64) * table_row
        k_at, v_at = k_ptr + kv_head.to(tl.int64) * K_HEAD, v_ptr + kv_head.to(tl.int64) * V_HEAD
        if SLICES > 0:  # block ids are asked for before the queries, so that both loads are under way at once
            block = slice_blocks(table_at, first_key, last_key, SLICES, TILE_KV // SLICES, BLOCK_SIZE)
        d = tl.arange(0, DIM_PAD)
        q_at = (
            q_ptr
            + ((start + query).to(tl.int64) * q_token + head.to(tl.int64) * q_head)[:, None]
            + d[None, :]
        )
        q_mask = valid[:, None] & (d < DIM)[None, :]
        slope = tl.zeros([TILE_M], tl.float32)
        if ALIBI:
            slope = tl.load(slopes_ptr + head, mask=valid, other=0.0)
        score_scale = scale
        v_scale = 1.0
        if KV_SCALES:
            score_scale = scale * tl.load(k_scale_ptr + kv_head * ks_head)
            v_scale = tl.load(v_scale_ptr + kv_head * vs_head)
        if SLICES > 0:
            if QUERY_LEN == 1:
                low, _ = visible_range(seq_len - 1, seq_len, WINDOW_LEFT, WINDOW_RIGHT, CHUNK, CAUSAL)
            maximum, denominator, acc = attend_slices(
                q_ptr=tl.trans(q_at),
                q_mask=tl.trans(q_mask),
                block=block,
                position=position,
                low=low,
                end=end,
                word=word,
                context=context,
                slope=slope,
                first_key=first_key,
                end_key=last_key,
                table_ptr=table_at,
                k_ptr=k_at,
                v_ptr=v_at,
                score_scale=score_scale,
                soft_cap=soft_cap,
                DIM=DIM,
                DIM_PAD=DIM_PAD,
                DIM_V=DIM_V,
                DIM_V_PAD=DIM_V_PAD,
                TILE_M=TILE_M,
                SLICES=SLICES,
                SLICE=TILE_KV // SLICES,
                BLOCK_SIZE=BLOCK_SIZE,
                K_BLOCK=K_BLOCK,
                K_SLOT=K_SLOT,
                V_BLOCK=V_BLOCK,
                V_SLOT=V_SLOT,
                SAME_MASK=QUERY_LEN == 1,
                FIRST_KEY_SEEN=WINDOW_LEFT < 0 and CHUNK <= 0,
                SOFT_CAP=SOFT_CAP,
                ALIBI=ALIBI,
                TREE=TREE,
                INTERPRET=INTERPRET,
            )
        else:
            q = tl.load(q_at, mask=q_mask, other=0.0)  # [M, D]
            maximum, denominator, acc = attend(
                q=q,
                position=position,
                low=low,
                end=end,
                word=word,
                context=context,
                slope=slope,
                first_key=first_key,
                end_key=last_key,
                table_ptr=table_at,
                k_ptr=k_at,
                v_ptr=v_at,
                k_block=K_BLOCK,
                k_slot=K_SLOT,
                v_block=V_BLOCK,
                v_slot=V_SLOT,
                score_scale=score_scale,
                soft_cap=soft_cap,
                DIM=DIM,
                DIM_PAD=DIM_PAD,
                DIM_V=DIM_V,
                DIM_V_PAD=DIM_V_PAD,
                TILE_M=TILE_M,
                TILE_KV=TILE_KV,
                BLOCK_SIZE=BLOCK_SIZE,
                FIRST_KEY_SEEN=WINDOW_LEFT < 0 and CHUNK <= 0,
                SOFT_CAP=SOFT_CAP,
                ALIBI=ALIBI,
                TREE=TREE,
                INTERPRET=INTERPRET,
            )
        # slices are merged in either branch: their layouts differ, and the compiler would prepare both
        if count == num_tiles:
            sink = tl.zeros([TILE_M], tl.float32)
            if SINKS:
                sink = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32)
            sees = valid
            if QUERY_LEN > 1:  # else the one query sees what gave the pair its tiles
                sees = end > low
            out, lse = finish(maximum, denominator, merge_slices(acc, SLICES), sink, v_scale, sees, SINKS)
            store_rows(
                out_ptr=out_ptr,
                lse_ptr=lse_ptr,
                out=out,
                lse=lse,
                token=start + query,
                head=head,
                valid=valid,
                o_token=o_token,
                o_head=o_head,
                l_token=l_token,
                l_head=l_head,
                DIM_V=DIM_V,
                DIM_V_PAD=DIM_V_PAD,
                HAS_LSE=HAS_LSE,
            )
        else:
            # A program has at most one part that begins inside a pair (slot 0) and one that begins a pair
            # (slot 1).
            slot = (program * 2 + (tile == 0).to(tl.int32)).to(tl.int64) * ROWS
            dv = tl.arange(0, DIM_V_PAD)
            tl.store(
                part_acc_ptr + (slot + row)[:, None] * DIM_V_PAD + dv[None, :],
                merge_slices(acc, SLICES),
                mask=(row < ROWS)[:, None],
            )
            tl.store(part_state_ptr + slot * 2 + row, maximum, mask=row < ROWS)
            tl.store(part_state_ptr + slot * 2 + ROWS + row, denominator, mask=row < ROWS)
            first_part = owner(pair_unit, total, programs)
            num_parts = owner(pair_unit + num_tiles - 1, total, programs) - first_part + 1
            semaphore = semaphore_ptr + request * NUM_KV_HEADS + kv_head
            # Nobody waits for another program here: the one that comes last finds all parts there, the others
            # go on. So programs that run one after another, in any order, end as well. The count is exact if
            # all programs see the same lengths: `num_parts` comes from them, and they are read behind the
            # wait or the fence above. The branch is the same for all threads: one lane's atomic is handed to
            # all, so that barriers in `merge_parts` are met by all or none.
            tl.debug_barrier()  # all lanes' parts are stored before one lane says so
            if tl.atomic_add(semaphore, 1, sem="acq_rel") == num_parts - 1:
                tl.store(semaphore, 0)
                merge_parts(
                    part_acc_ptr=part_acc_ptr,
                    part_state_ptr=part_state_ptr,
                    first_part=first_part,
                    num_parts=num_parts,
                    out_ptr=out_ptr,
                    lse_ptr=lse_ptr,
                    sinks_ptr=sinks_ptr,
                    v_scale=v_scale,
                    start=start,
                    query_len=query_len,
                    seq_len=seq_len,
                    kv_head=kv_head,
                    o_token=o_token,
                    o_head=o_head,
                    l_token=l_token,
                    l_head=l_head,
                    GROUP=GROUP,
                    QUERY_LEN=QUERY_LEN,
                    DIM_V=DIM_V,
                    DIM_V_PAD=DIM_V_PAD,
                    ROWS=ROWS,
                    PARTS=PARTS,
                    CAUSAL=CAUSAL,
                    WINDOW_LEFT=WINDOW_LEFT,
                    WINDOW_RIGHT=WINDOW_RIGHT,
                    CHUNK=CHUNK,
                    SINKS=SINKS,
                    HAS_LSE=HAS_LSE,
                )
        unit += count

    if unwritten:
        store_empty(
            out_ptr=out_ptr,
            lse_ptr=lse_ptr,
            seq_lens_ptr=seq_lens_ptr,
            starts_ptr=starts_ptr,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            o_token=o_token,
            o_head=o_head,
            l_token=l_token,
            l_head=l_head,
            GROUP=GROUP,
            NUM_KV_HEADS=NUM_KV_HEADS,
            DIM_V=DIM_V,
            DIM_V_PAD=DIM_V_PAD,
            TILE_M=TILE_M,
            TILE_KV=TILE_KV,
            CAUSAL=CAUSAL,
            WINDOW_LEFT=WINDOW_LEFT,
            WINDOW_RIGHT=WINDOW_RIGHT,
            CHUNK=CHUNK,
            HAS_LSE=HAS_LSE,
            LONGEST=LONGEST,
        )
    # The last program waits for the prefill launch to end, so that this launch does not end before: kernels
    # behind wait for this one alone. The prefill launch waits for none of its dependents, so it ends; each
    # program of this one runs to here whatever it found to do.
    if PDL and LONGEST > 0:  # noqa: SIM102  one condition is the compiler's, the other the kernel's
        if program == tl.num_programs(0) - 1:
            tl.extra.cuda.gdc_wait()


@triton.jit
def store_empty(
    out_ptr,
    lse_ptr,
    seq_lens_ptr,
    starts_ptr,
    num_reqs,
    num_tokens,
    o_token,
    o_head,
    l_token,
    l_head,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM_V: tl.constexpr,
    DIM_V_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Zeros and -inf for what no run covers: requests whose queries see nothing, and token rows after the
    last request's."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    head = tl.arange(0, TILE_M)
    zero = tl.zeros([TILE_M, DIM_V_PAD], tl.float32)
    nothing = tl.full([TILE_M], float("-inf"), tl.float32)
    for request in range(program, num_reqs, programs):
        start = tl.load(starts_ptr + request)
        query_len = tl.load(starts_ptr + request + 1) - start
        if LONGEST > 0:
            query_len = tl.where(query_len > LONGEST, 0, query_len)
        _, end_key = key_range(
            tl.load(seq_lens_ptr + request), query_len, WINDOW_LEFT, WINDOW_RIGHT, CHUNK, CAUSAL, TILE_KV
        )
        if end_key == 0:
            for pair in range(query_len * NUM_KV_HEADS):
                token = tl.zeros([TILE_M], tl.int32) + start + pair // NUM_KV_HEADS
                first_head = pair % NUM_KV_HEADS * GROUP
                store_rows(
                    out_ptr=out_ptr,
                    lse_ptr=lse_ptr,
                    out=zero,
                    lse=nothing,
                    token=token,
                    head=first_head + head,
                    valid=head < GROUP,
                    o_token=o_token,
                    o_head=o_head,
                    l_token=l_token,
                    l_head=l_head,
                    DIM_V=DIM_V,
                    DIM_V_PAD=DIM_V_PAD,
                    HAS_LSE=HAS_LSE,
                )
    for first_head in range(0, NUM_KV_HEADS * GROUP, GROUP):
        store_padding(
            out_ptr=out_ptr,
            lse_ptr=lse_ptr,
            starts_ptr=starts_ptr,
            first=program,
            step=programs,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            head=first_head + head,
            valid=head < GROUP,
            o_token=o_token,
            o_head=o_head,
            l_token=l_token,
            l_head=l_head,
            TILE_M=TILE_M,
            DIM_V=DIM_V,
            DIM_V_PAD=DIM_V_PAD,
            HAS_LSE=HAS_LSE,
        )


@triton.jit
def merge_parts(
    part_acc_ptr,
    part_state_ptr,
    first_part,
    num_parts,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    v_scale,
    start,
    query_len,
    seq_len,
    kv_head,
    o_token,
    o_head,
    l_token,
    l_head,
    GROUP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    DIM_V: tl.constexpr,
    DIM_V_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Combine the parts of one pair, written by programs ``first_part ...``: slot 1 of the first, slot 0 of
    the others."""
    row = tl.arange(0, ROWS)
    dv = tl.arange(0, DIM_V_PAD)
    at = row[:, None] * DIM_V_PAD + dv[None, :]
    # Every thread reads the states of its own rows: all is elementwise, nothing crosses threads. .cg: other
    # programs wrote these, L1 must not answer. The first part sits in slot 1 of its program.
    slot = (first_part * 2 + 1).to(tl.int64) * ROWS
    maximum = tl.load(part_state_ptr + slot * 2 + row[:, None], cache_modifier=".cg")  # [ROWS, 1]
    denominator = tl.load(part_state_ptr + slot * 2 + ROWS + row[:, None], cache_modifier=".cg")
    acc = tl.load(part_acc_ptr + slot * DIM_V_PAD + at, cache_modifier=".cg")  # [ROWS, DV]
    for begin in range(1, num_parts, PARTS):
        for step in tl.static_range(PARTS):
            # a mask of a mask's shape and type, in the interpreter too
            inside = tl.zeros([ROWS, 1], tl.int32) + (begin + step) < num_parts
            slot = ((first_part + begin + step) * 2).to(tl.int64) * ROWS
            state = part_state_ptr + slot * 2 + row[:, None]
            part_max = tl.load(state, mask=inside, other=-1.0e30, cache_modifier=".cg")
            part_total = tl.load(state + ROWS, mask=inside, other=0.0, cache_modifier=".cg")
            part_acc = tl.load(
                part_acc_ptr + slot * DIM_V_PAD + at, mask=inside, other=0.0, cache_modifier=".cg"
            )
            top = tl.maximum(maximum, part_max)
            shrink, weight = tl.exp2(maximum - top), tl.exp2(part_max - top)
            denominator = denominator * shrink + part_total * weight
            acc = acc * shrink + part_acc * weight
            maximum = top
    maximum, denominator = tl.max(maximum, 1), tl.max(denominator, 1)  # one number each
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = (query < query_len) & (query < QUERY_LEN)
    sink = tl.zeros([ROWS], tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32)
    sees = valid
    if QUERY_LEN > 1:
        low, end = visible_range(
            seq_len - query_len + query, seq_len, WINDOW_LEFT, WINDOW_RIGHT, CHUNK, CAUSAL
        )
        sees = end > low
    out, lse = finish(maximum, denominator, acc, sink, v_scale, sees, SINKS)
    store_rows(
        out_ptr=out_ptr,
        lse_ptr=lse_ptr,
        out=out,
        lse=lse,
        token=start + query,
        head=head,
        valid=valid,
        o_token=o_token,
        o_head=o_head,
        l_token=l_token,
        l_head=l_head,
        DIM_V=DIM_V,
        DIM_V_PAD=DIM_V_PAD,
        HAS_LSE=HAS_LSE,
    )
