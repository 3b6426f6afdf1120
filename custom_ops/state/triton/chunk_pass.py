"""The second of the two kernels of long rows: from chunk to chunk, a program per row, head and tile of value
columns, whose part of the state stays in registers.

Few heads of very long rows are cut into segments, side by side. A chunk takes a state S to ``A S + B``, and
so does a segment: a first pass over all segments takes zeros to the B of each, the identity to its A, by the
same steps without results; `join_kernel` goes from segment to segment; a second pass has each segment's state
at its begin.
"""

import triton
import triton.language as tl

from torchpaged.custom_ops.state.triton.chunk_products import load_rows, product
from torchpaged.custom_ops.state.triton.rows import row_of
from torchpaged.custom_ops.triton.find_row import find_row_of_tile


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "segment"])
def pass_kernel(
    num_reqs,
    num_tokens,
    segment,
    q,
    k,
    v,
    batch,
    state,
    out,
    chunks,
    joined_ptr,
    SIZES: tl.constexpr,
    STAGES: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Grid: (rows * heads * tiles of columns,), tiles fastest; ``q, k, v, out``: `Tokens`. With
    ``joined_ptr``, float32 ``[num_tokens // segment + rows, heads, key_dim, value_dim + key_dim]``,
    segments in the rows' place; values' columns have their states at their begins. ENDS: the first pass,
    which has columns of keys, too, and writes ``joined_ptr`` alone, but for a row's last segment."""
    CHUNK: tl.constexpr = SIZES.chunk
    KEY_DIM: tl.constexpr = SIZES.key_dim
    VALUE_DIM: tl.constexpr = SIZES.value_dim
    PRECISION: tl.constexpr = SIZES.precision
    TILE: tl.constexpr = SIZES.tile
    WIDTH: tl.constexpr = VALUE_DIM + KEY_DIM
    COLUMNS: tl.constexpr = WIDTH if ENDS else VALUE_DIM
    TILES: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    pid = tl.program_id(0)
    head = pid // TILES % SIZES.heads
    place = pid // (TILES * SIZES.heads)
    if joined_ptr is not None:
        req, part = find_row_of_tile(place, batch.starts, num_reqs, segment)
    else:
        req, part, segment = place, 0, num_tokens
    begin, count, first, slot, seq_len = row_of(req, batch)
    low = part * segment
    high = tl.minimum(low + segment, count)
    d = pid % TILES * TILE + tl.arange(0, TILE)
    needed = (count > SIZES.short) & (slot > 0) & (low < count)
    if ENDS:  # a row's first segment knows its state
        needed &= (high < count) & ((part > 0) | (pid % TILES * TILE < VALUE_DIM))
    DTYPE: tl.constexpr = chunks.scores.dtype.element_ty
    if needed:
        n, i = tl.arange(0, SIZES.key_pad), tl.arange(0, CHUNK)
        inside = (n < KEY_DIM)[:, None] & (d < COLUMNS)[None, :]
        of_state = state.ptr + slot * state.slot + head * state.head + n[:, None] * state.row + d[None, :]
        if joined_ptr is not None:
            of_part = (
                joined_ptr + ((place * SIZES.heads + head).to(tl.int64) * KEY_DIM + n[:, None]) * WIDTH + d
            )
        if ENDS or joined_ptr is None:
            kept = inside & (d < VALUE_DIM)[None, :] & (part == 0) & (seq_len > count)
            matrix = tl.load(of_state, mask=kept, other=0.0).to(tl.float32)
        else:
            matrix = tl.load(of_part, mask=inside, other=0.0)
        if ENDS:
            matrix += tl.where((n[:, None] == (d - VALUE_DIM)[None, :]) & (part > 0), 1.0, 0.0)
        start = begin.to(tl.int64)
        here = head.to(tl.int64) * num_tokens + start
        for base in tl.range(tl.maximum(low, first // CHUNK * CHUNK), high, CHUNK, num_stages=STAGES):
            at = base + i
            live = (at >= first) & (at < count)
            inside_keys = live[:, None] & (n < KEY_DIM)[None, :]
            by_key = (here + at)[:, None] * KEY_DIM + n[None, :]
            if SIZES.by_key:
                if not ENDS:
                    queries = tl.load(chunks.queries + by_key, mask=inside_keys, other=0.0)
                keys = tl.load(chunks.keys + by_key, mask=inside_keys, other=0.0)
            else:
                if not ENDS:
                    queries = load_rows(q, start + at, live, head // SIZES.group, n, KEY_DIM).to(DTYPE)
                keys = load_rows(k, start + at, live, head // SIZES.group, n, KEY_DIM).to(DTYPE)
            if not ENDS:
                ptrs = chunks.scores + (here + at)[:, None] * CHUNK + i[None, :]
                scores = tl.load(ptrs, mask=live[:, None], other=0.0)
                since = tl.load(chunks.since + here + at, mask=live, other=0.0)
            left = tl.load(chunks.left + here + at, mask=live, other=0.0)
            if SIZES.by_key:
                number = ((begin // CHUNK + req + base // CHUNK) * SIZES.heads + head).to(tl.int64)
                decay = tl.load(chunks.decay + number * KEY_DIM + n, mask=n < KEY_DIM, other=0.0)[:, None]
            else:
                decay = tl.load(chunks.decay + here + tl.maximum(base, first))
            held = matrix.to(DTYPE)
            u = load_rows(v, start + at, live, head, d, VALUE_DIM)
            if SIZES.delta:
                ptrs = chunks.solved + (here + at)[:, None] * CHUNK + i[None, :]
                solved = tl.load(ptrs, mask=live[:, None], other=0.0)
                known = tl.load(chunks.known + by_key, mask=inside_keys, other=0.0) if SIZES.by_key else keys
                seen = tl.load(chunks.seen + here + at, mask=live, other=0.0)
                known = product(known, held, PRECISION) * seen[:, None]
                u = product(solved, (u.to(tl.float32) - known).to(DTYPE), PRECISION)
            if not ENDS:
                y = product(queries, held, PRECISION) * since[:, None]
                y += product(scores, u.to(DTYPE), PRECISION)
                ptrs = out.ptr + (start + at)[:, None] * out.token + head * out.head + d[None, :]
                here_out = live[:, None] & (d < VALUE_DIM)[None, :]
                tl.store(ptrs, y.to(out.ptr.dtype.element_ty), mask=here_out)
            u = u.to(tl.float32) * left[:, None]
            matrix = matrix * decay + product(tl.trans(keys), u.to(DTYPE), PRECISION)
        if ENDS:
            tl.store(of_part, matrix, mask=inside)
        else:
            tl.store(of_state, matrix.to(state.ptr.dtype.element_ty), mask=inside & (high == count))


@triton.jit
def exact_product(a, b, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Of two matrices of float32, each as a sum of two of DTYPE."""
    high_a, high_b = a.to(DTYPE), b.to(DTYPE)
    low_a, low_b = (a - high_a.to(tl.float32)).to(DTYPE), (b - high_b.to(tl.float32)).to(DTYPE)
    rest = product(low_a, high_b, PRECISION) + product(high_a, low_b, PRECISION)
    return rest + product(high_a, high_b, PRECISION)


@triton.jit
def join_kernel(segment, batch, state, joined_ptr, SIZES: tl.constexpr, HALF: tl.constexpr):
    """Between two passes over segments: of what a segment leaves of zeros, its state at its begin, in its
    place. Grid: (rows * heads * tiles of values,). HALF: products are of bfloat16."""
    KEY_DIM: tl.constexpr = SIZES.key_dim
    VALUE_DIM: tl.constexpr = SIZES.value_dim
    TILE: tl.constexpr = SIZES.tile
    DTYPE: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    PRECISION: tl.constexpr = SIZES.precision
    WIDTH: tl.constexpr = VALUE_DIM + KEY_DIM
    TILES: tl.constexpr = (VALUE_DIM + TILE - 1) // TILE
    pid = tl.program_id(0)
    head = pid // TILES % SIZES.heads
    req = pid // (TILES * SIZES.heads)
    begin, count, _, slot, seq_len = row_of(req, batch)
    if (count > SIZES.short) & (slot > 0):
        n, d = tl.arange(0, SIZES.key_pad), pid % TILES * TILE + tl.arange(0, TILE)
        inside = (n < KEY_DIM)[:, None] & (d < VALUE_DIM)[None, :]
        of_keys = (n < KEY_DIM)[:, None] & (n < KEY_DIM)[None, :]
        ptrs = state.ptr + slot * state.slot + head * state.head + n[:, None] * state.row + d[None, :]
        matrix = tl.load(ptrs, mask=inside & (seq_len > count), other=0.0).to(tl.float32)
        place = begin // segment + req
        last = (count - 1) // segment
        for part in range(last + 1):
            rows = joined_ptr + ((place + part) * SIZES.heads + head).to(tl.int64) * KEY_DIM * WIDTH
            here = rows + n[:, None] * WIDTH
            end = tl.load(here + d[None, :], mask=inside & (part < last), other=0.0)
            tl.debug_barrier()  # other threads' numbers are there
            tl.store(here + d[None, :], matrix, mask=inside)
            if (part > 0) & (part < last):
                over = tl.load(here + VALUE_DIM + n[None, :], mask=of_keys, other=0.0)
                end += exact_product(over, matrix, DTYPE, PRECISION)
            matrix = end
