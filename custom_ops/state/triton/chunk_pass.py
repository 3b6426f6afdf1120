"""The second of the two kernels of long rows: from chunk to chunk, a program per row, head and tile of value
columns, whose part of the state stays in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from torchpaged.custom_ops.state.triton.causal_conv import row_of
from torchpaged.custom_ops.state.triton.chunk_products import load_rows, product


@triton.jit(do_not_specialize=["num_tokens"])
def pass_kernel(
    num_tokens,
    q,
    k,
    v,
    batch,
    state,
    out,
    chunks,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    SHORT: tl.constexpr,
    DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    BY_KEY: tl.constexpr,
):
    """Grid: (rows * NUM_HEADS * tiles of values,), tiles fastest; ``q, k, v, out``: `Tokens`."""
    VALUE_TILES: tl.constexpr = (VALUE_DIM + TILE - 1) // TILE
    pid = tl.program_id(0)
    head = pid // VALUE_TILES % NUM_HEADS
    req = pid // (VALUE_TILES * NUM_HEADS)
    begin, count, first, slot, seq_len = row_of(req, batch)
    DTYPE: tl.constexpr = chunks.scores.dtype.element_ty
    if (count > SHORT) & (slot > 0):
        n, i = tl.arange(0, KEY_PAD), tl.arange(0, CHUNK)
        d = pid % VALUE_TILES * TILE + tl.arange(0, TILE)
        place = state.ptr + slot * state.slot + head * state.head + n[:, None] * state.row + d[None, :]
        inside = (n < KEY_DIM)[:, None] & (d < VALUE_DIM)[None, :]
        matrix = tl.load(place, mask=inside & (seq_len > count), other=0.0).to(tl.float32)
        start = begin.to(tl.int64)
        here = head.to(tl.int64) * num_tokens + start
        for base in tl.range(first // CHUNK * CHUNK, count, CHUNK, num_stages=STAGES):
            at = base + i
            live = (at >= first) & (at < count)
            if BY_KEY:
                inside_keys = live[:, None] & (n < KEY_DIM)[None, :]
                ptrs = (here + at)[:, None] * KEY_DIM + n[None, :]
                queries = tl.load(chunks.since + ptrs, mask=inside_keys, other=0.0)
                keys = tl.load(chunks.left + ptrs, mask=inside_keys, other=0.0)
            else:
                queries = load_rows(q, start + at, live, head // GROUP, n, KEY_DIM).to(DTYPE)
                keys = load_rows(k, start + at, live, head // GROUP, n, KEY_DIM).to(DTYPE)
            scores = tl.load(
                chunks.scores + (here + at)[:, None] * CHUNK + i[None, :], mask=live[:, None], other=0.0
            )
            if BY_KEY:
                last = here + tl.minimum(base + CHUNK, count) - 1
                decay = tl.exp(tl.load(chunks.sums + last * KEY_DIM + n, mask=n < KEY_DIM, other=0.0))[
                    :, None
                ]
            else:
                since = tl.load(chunks.since + here + at, mask=live, other=0.0)
                left = tl.load(chunks.left + here + at, mask=live, other=0.0)
                decay = tl.load(chunks.decay + here + tl.maximum(base, first))
            held = matrix.to(DTYPE)
            u = load_rows(v, start + at, live, head, d, VALUE_DIM)
            if DELTA:
                ptrs = chunks.solved + (here + at)[:, None] * CHUNK + i[None, :]
                solved = tl.load(ptrs, mask=live[:, None], other=0.0)
                if BY_KEY:
                    ptrs = chunks.seen + (here + at)[:, None] * KEY_DIM + n[None, :]
                    known = product(tl.load(ptrs, mask=inside_keys, other=0.0), held, PRECISION)
                else:
                    seen = tl.load(chunks.seen + here + at, mask=live, other=0.0)
                    known = product(keys, held, PRECISION) * seen[:, None]
                u = product(solved, (u.to(tl.float32) - known).to(DTYPE), PRECISION)
            y = product(queries, held, PRECISION)
            if not BY_KEY:
                y *= since[:, None]
            y += product(scores, u.to(DTYPE), PRECISION)
            ptrs = out.ptr + (start + at)[:, None] * out.token + head * out.head + d[None, :]
            tl.store(ptrs, y.to(out.ptr.dtype.element_ty), mask=live[:, None] & (d < VALUE_DIM)[None, :])
            if not BY_KEY:
                u = u.to(tl.float32) * left[:, None]
            matrix = matrix * decay + product(tl.trans(keys), u.to(DTYPE), PRECISION)
        tl.store(place, matrix.to(state.ptr.dtype.element_ty), mask=inside)
