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

import triton
import triton.language as tl

from torchpaged.custom_ops.attention.triton.attend import attend, finish, keys_of, load_sinks, load_slopes
from torchpaged.custom_ops.attention.triton.block_sparse import path_of, place
from torchpaged.custom_ops.attention.triton.rows import query_rows, visible_range
from torchpaged.custom_ops.attention.triton.schedule import key_range, owner, schedule, work_tile
from torchpaged.custom_ops.attention.triton.slices import attend_slices, merge_slices, slice_blocks
from torchpaged.custom_ops.triton.cache_writes import fence
from torchpaged.custom_ops.triton.records import Batch
from torchpaged.custom_ops.triton.results import store_rows


@triton.jit
def store_padding(
    results, batch, first, step, head, valid, TILE_M: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr
):
    """Token rows after the last request's: zeros and -inf, shared out over the programs. WIDTH, PAD: columns
    of a value, and of a tile of them."""
    used = tl.load(batch.starts + batch.num_reqs)
    zero = tl.zeros([TILE_M, PAD], tl.float32)
    nothing = tl.full([TILE_M], float("-inf"), tl.float32)
    for token in range(used + first, batch.num_tokens, step):
        rows = tl.zeros([TILE_M], tl.int32) + token
        store_rows(results, zero, nothing, rows, head, valid, WIDTH, PAD)


@triton.jit
def begin(LONGEST: tl.constexpr):
    """What a program launched early does first.

    LONGEST == 0: every program waits, then lets its dependents go (docs/stream_order.md).
    LONGEST > 0: no program waits here for the prefill launch. Behind it this program begins once each of
    its programs has let go or ended, and each waits first for all kernels ahead of it, also those that
    find no tile: none ends before. So whatever stands ahead of both has ended, with its stores in L2,
    when the first instruction here runs; q, lengths, tables, keys and semaphores are not written by the
    prefill launch. What an older kernel left in this multiprocessor's L1 is not bound by that: the
    fence drops it, for every load behind. What could turn the order round:
    - the compiler: waits, lets and the fence are volatile assembly, which it moves across no load
      or store;
    - an early exit: the prefill grid is never empty (config.most_tiles_of_longer) and leaves no path
      around its wait;
    - another kernel between the two launches: paged_attention allocates and clears all it needs before
      the first;
    - a lazily loaded module: loading it delays this launch, which may then find the prefill
      launch ended;
    - a second stream: both launches go to one stream; a graph keeps their edge. Calls that may overlap
      need semaphores of their own.
    """
    if LONGEST == 0:
        tl.extra.cuda.gdc_wait()
    else:
        fence()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def mainloop(work, rows, query, head, inputs, batch, SPEC: tl.constexpr, TILING: tl.constexpr):
    """The softmax state of a work tile's rows over its keys: ``(maximum [M], total [M], acc)``, ``acc`` as
    `merge_slices` takes it; and the scale of the values."""
    last_key = tl.minimum(work.first_key + work.count * TILING.tile_kv, work.end_key)
    keys = keys_of(inputs, batch, work.request, work.kv_head, SPEC.k_strides[2], SPEC.v_strides[2])
    end_key = last_key
    if TILING.verticals > 0:
        end_key = work.seq_len
    path = path_of(work.seq_len - work.query_len, work.kv_head, end_key, SPEC, TILING)
    if (
        TILING.slices > 0
    ):  # block ids are asked for before the queries, so that both loads are under way at once
        SLICE: tl.constexpr = TILING.tile_kv // TILING.slices
        first = place(work.first_key, path, SPEC, TILING)
        block = slice_blocks(keys.table, first, end_key, TILING.slices, SLICE, SPEC.block_size)
    d = tl.arange(0, TILING.dim_pad)
    q_row = (work.start + query).to(tl.int64) * inputs.q_token + head.to(tl.int64) * inputs.q_head
    q_at = inputs.q + q_row[:, None] + d[None, :]
    q_mask = rows.valid[:, None] & (d < SPEC.dim)[None, :]
    slope = load_slopes(inputs, head, rows.valid, SPEC)
    score_scale = inputs.scale
    v_scale = 1.0
    if SPEC.scales:
        score_scale = inputs.scale * tl.load(inputs.k_scale + work.kv_head * inputs.ks_head)
        v_scale = tl.load(inputs.v_scale + work.kv_head * inputs.vs_head)
    if TILING.slices > 0:
        low = rows.low
        if TILING.query_len == 1:
            low, _ = visible_range(work.seq_len - 1, work.seq_len, SPEC)
        maximum, total, acc = attend_slices(
            q_ptr=tl.trans(q_at),
            q_mask=tl.trans(q_mask),
            block=block,
            rows=rows,
            slope=slope,
            low=low,
            first_key=work.first_key,
            end_key=last_key,
            path=path,
            keys=keys,
            score_scale=score_scale,
            soft_cap=inputs.soft_cap,
            SPEC=SPEC,
            TILING=TILING,
        )
    else:
        q = tl.load(q_at, mask=q_mask, other=0.0)  # [M, D]
        maximum, total, acc = attend(
            q, rows, slope, work.first_key, last_key, path, keys, score_scale, inputs.soft_cap, SPEC, TILING
        )
    return maximum, total, acc, v_scale


@triton.jit
def store_part(parts, maximum, denominator, acc, slot, row, SPEC: tl.constexpr, TILING: tl.constexpr):
    """A partial result, the state that `mainloop` gives, into ``slot`` of the scratch memory."""
    slot = slot.to(tl.int64) * TILING.rows
    dv = tl.arange(0, TILING.dim_v_pad)
    inside = row < TILING.rows
    tl.store(
        parts.acc + (slot + row)[:, None] * TILING.dim_v_pad + dv[None, :],
        merge_slices(acc, TILING.slices),
        mask=inside[:, None],
    )
    tl.store(parts.state + slot * 2 + row, maximum, mask=inside)
    tl.store(parts.state + slot * 2 + TILING.rows + row, denominator, mask=inside)


@triton.jit
def store_whole(work, rows, query, head, state, inputs, results, SPEC: tl.constexpr, TILING: tl.constexpr):
    """The epilogue of a work tile that is all of its pair; ``state``: as `mainloop` gives it."""
    maximum, denominator, acc, v_scale = state
    sink = load_sinks(inputs, head, rows.valid, SPEC)
    sees = rows.valid
    if TILING.query_len > 1:  # else the one query sees what gave the pair its tiles
        sees = rows.end > rows.low
    merged = merge_slices(acc, TILING.slices)
    out, lse = finish(maximum, denominator, merged, sink, v_scale, sees, SPEC.sinks)
    store_rows(results, out, lse, work.start + query, head, rows.valid, SPEC.dim_v, TILING.dim_v_pad)


@triton.jit
def store_or_merge(work, plan, row, state, inputs, results, parts, SPEC: tl.constexpr, TILING: tl.constexpr):
    """The epilogue of a work tile that is a part of its pair: into scratch memory; and the pair's whole
    result, if no other part is missing."""
    maximum, denominator, acc, v_scale = state
    # A program has at most one part that begins inside a pair (slot 0) and one that begins a pair
    # (slot 1).
    slot = tl.program_id(0) * 2 + (work.tile == 0).to(tl.int32)
    store_part(parts, maximum, denominator, acc, slot, row, SPEC, TILING)
    first_part = owner(work.first_unit, plan.total, plan.programs)
    last_part = owner(work.first_unit + work.num_tiles - 1, plan.total, plan.programs)
    num_parts = last_part - first_part + 1
    semaphore = parts.semaphore + work.request * SPEC.num_kv_heads + work.kv_head
    # No program waits for another here: the one that comes last finds all parts there, the others
    # go on. So programs that run one after another, in any order, end as well. The count is exact if
    # all programs see the same lengths: `num_parts` comes from them, and they are read behind the
    # wait or the fence of `begin`. The branch is the same for all threads: one lane's atomic is handed to
    # all, so that barriers in `merge_parts` are met by all or none.
    tl.debug_barrier()  # all lanes' parts are stored before one lane says so
    if tl.atomic_add(semaphore, 1, sem="acq_rel") == num_parts - 1:
        tl.store(semaphore, 0)
        merge_parts(parts, first_part, num_parts, work, v_scale, inputs, results, SPEC, TILING)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "table_row"])  # one compile for all batch sizes
def decode_kernel(
    num_reqs,
    num_tokens,
    table_row,
    batch,
    inputs,
    results,
    parts,
    SPEC: tl.constexpr,
    TILING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Arguments: `DecodeArguments`. Grid: any number of programs, the same for every length.

    ``TILING.longest`` over 0: another launch, of the requests with more query tokens, stands right before
    this one and neither writes what this one reads nor the other way round: only the last program waits for
    it, at its end, since what comes after this launch counts on both.
    """
    batch = Batch(batch.table, batch.seq_lens, batch.starts, num_reqs, num_tokens, table_row)
    if PDL:
        begin(TILING.longest)
    row = tl.arange(0, TILING.tile_m)
    query = tl.zeros_like(row)
    head_of_group = row
    if TILING.query_len > 1:
        query, head_of_group = row // SPEC.group, row % SPEC.group
    plan = schedule(batch, SPEC, TILING)
    unit = plan.unit
    while unit < plan.unit_end:
        work = work_tile(unit, plan.unit_end, plan.ends, batch, SPEC, TILING)
        head = work.kv_head * SPEC.group + head_of_group
        if TILING.query_len > 1:
            valid = (query < work.query_len) & (query < TILING.query_len)
        else:
            valid = row < SPEC.group  # a request that sees keys has its one query
        rows = query_rows(inputs, work.start, query, head, work.query_len, work.seq_len, valid, SPEC)
        state = mainloop(work, rows, query, head, inputs, batch, SPEC, TILING)
        # slices are merged in either branch: their layouts differ, and the compiler would prepare both
        if work.count == work.num_tiles:
            store_whole(work, rows, query, head, state, inputs, results, SPEC, TILING)
        else:
            store_or_merge(work, plan, row, state, inputs, results, parts, SPEC, TILING)
        unit += work.count

    if plan.unwritten:
        store_empty(results, batch, SPEC, TILING)
    # The last program waits for the prefill launch to end, so that this launch does not end before: kernels
    # behind wait for this one alone. The prefill launch waits for none of its dependents, so it ends; each
    # program of this one runs to here whatever it found to do.
    if PDL and TILING.longest > 0:  # noqa: SIM102  one condition is the compiler's, the other the kernel's
        if tl.program_id(0) == tl.num_programs(0) - 1:
            tl.extra.cuda.gdc_wait()


@triton.jit
def store_empty(results, batch, SPEC: tl.constexpr, TILING: tl.constexpr):
    """Zeros and -inf for what no run covers: requests whose queries see nothing, and token rows after the
    last request's."""
    TILE_M: tl.constexpr = TILING.tile_m
    DIM_V_PAD: tl.constexpr = TILING.dim_v_pad
    program, programs = tl.program_id(0), tl.num_programs(0)
    head = tl.arange(0, TILE_M)
    zero = tl.zeros([TILE_M, DIM_V_PAD], tl.float32)
    nothing = tl.full([TILE_M], float("-inf"), tl.float32)
    for request in range(program, batch.num_reqs, programs):
        start = tl.load(batch.starts + request)
        query_len = tl.load(batch.starts + request + 1) - start
        if TILING.longest > 0:
            query_len = tl.where(query_len > TILING.longest, 0, query_len)
        _, end_key = key_range(tl.load(batch.seq_lens + request), query_len, SPEC, TILING)
        if end_key == 0:
            for pair in range(query_len * SPEC.num_kv_heads):
                token = tl.zeros([TILE_M], tl.int32) + start + pair // SPEC.num_kv_heads
                heads = pair % SPEC.num_kv_heads * SPEC.group + head
                valid = head < SPEC.group
                store_rows(results, zero, nothing, token, heads, valid, SPEC.dim_v, TILING.dim_v_pad)
    for first_head in range(0, SPEC.num_kv_heads * SPEC.group, SPEC.group):
        valid = head < SPEC.group
        store_padding(
            results, batch, program, programs, first_head + head, valid, TILE_M, SPEC.dim_v, TILING.dim_v_pad
        )


@triton.jit
def merge_parts(
    parts, first_part, num_parts, work, v_scale, inputs, results, SPEC: tl.constexpr, TILING: tl.constexpr
):
    """Combine the parts of one pair, written by programs ``first_part ...``: slot 1 of the first, slot 0 of
    the others."""
    ROWS: tl.constexpr = TILING.rows
    PARTS: tl.constexpr = TILING.parts
    DIM_V_PAD: tl.constexpr = TILING.dim_v_pad
    row = tl.arange(0, ROWS)
    dv = tl.arange(0, DIM_V_PAD)
    at = row[:, None] * DIM_V_PAD + dv[None, :]
    # Every thread reads the states of its own rows: all is elementwise, nothing crosses threads. .cg: other
    # programs wrote these, L1 must not answer. The first part sits in slot 1 of its program.
    slot = (first_part * 2 + 1).to(tl.int64) * ROWS
    maximum = tl.load(parts.state + slot * 2 + row[:, None], cache_modifier=".cg")  # [ROWS, 1]
    denominator = tl.load(parts.state + slot * 2 + ROWS + row[:, None], cache_modifier=".cg")
    acc = tl.load(parts.acc + slot * DIM_V_PAD + at, cache_modifier=".cg")  # [ROWS, DV]
    for begin in range(1, num_parts, PARTS):
        for step in tl.static_range(PARTS):
            # a mask of a mask's shape and type, in the interpreter too
            inside = tl.zeros([ROWS, 1], tl.int32) + (begin + step) < num_parts
            slot = ((first_part + begin + step) * 2).to(tl.int64) * ROWS
            state = parts.state + slot * 2 + row[:, None]
            part_max = tl.load(state, mask=inside, other=-1.0e30, cache_modifier=".cg")
            part_total = tl.load(state + ROWS, mask=inside, other=0.0, cache_modifier=".cg")
            part_acc = tl.load(
                parts.acc + slot * DIM_V_PAD + at, mask=inside, other=0.0, cache_modifier=".cg"
            )
            top = tl.maximum(maximum, part_max)
            shrink, weight = tl.exp2(maximum - top), tl.exp2(part_max - top)
            denominator = denominator * shrink + part_total * weight
            acc = acc * shrink + part_acc * weight
            maximum = top
    maximum, denominator = tl.max(maximum, 1), tl.max(denominator, 1)  # one number each
    query = row // SPEC.group
    head = work.kv_head * SPEC.group + row % SPEC.group
    valid = (query < work.query_len) & (query < TILING.query_len)
    sink = load_sinks(inputs, head, valid, SPEC)
    sees = valid
    if TILING.query_len > 1:
        low, end = visible_range(work.seq_len - work.query_len + query, work.seq_len, SPEC)
        sees = end > low
    out, lse = finish(maximum, denominator, acc, sink, v_scale, sees, SPEC.sinks)
    store_rows(results, out, lse, work.start + query, head, valid, SPEC.dim_v, DIM_V_PAD)
