"""The first of two kernels of long rows whose keys' columns decay one by one, as in Kimi delta attention:
what `chunk_products` is to rows with a decay for each head.

Source: Kimi Team, "Kimi Linear" (arXiv:2510.26692), section 3. With G the sums of a chunk's decays, a pair of
tokens weighs ``sum_d q_id k_jd exp(G_id - G_jd)``, and neither ``exp(G_i)`` nor ``exp(-G_j)`` need be a
number. So a chunk is halved again and again: of the pairs whose tokens a border parts, all exponents are
taken from that border, below 0 on both sides, and all pairs of a level are one product of matrices.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchpaged.custom_ops.state.triton.chunk_products import (
    chunk_of,
    load_gate,
    load_rows,
    product,
    store_solved,
    store_zeros,
    sum_decays,
)


@triton.jit
def load_sums(sums, place, here, dim, WIDTH: tl.constexpr):
    """Of `Chunks`; zeros where there are none."""
    ptrs = sums + place[:, None] * WIDTH + dim[None, :]
    return tl.load(ptrs, mask=here[:, None] & (dim < WIDTH)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def key_chunk_kernel(
    num_reqs,
    num_tokens,
    scale,
    q,
    k,
    v,
    g,
    beta,
    batch,
    out,
    chunks,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    SHORT: tl.constexpr,
    DELTA: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As `chunk_kernel`; ``g``: `Tokens`. With the delta rule alone."""
    tl.static_assert(DELTA)
    LEVELS: tl.constexpr = 4 + (CHUNK >= 32) + (CHUNK >= 64)
    DTYPE: tl.constexpr = chunks.scores.dtype.element_ty
    head = tl.program_id(0) % NUM_HEADS
    part, begin, count, first, live, void = chunk_of(
        tl.program_id(0) // NUM_HEADS, batch, num_reqs, num_tokens, CHUNK, SHORT
    )
    i, d = tl.arange(0, CHUNK), tl.arange(0, TILE)
    at = part * CHUNK + i
    token = begin + at
    if tl.max(void.to(tl.int32), 0) > 0:
        store_zeros(out, token, void, head, d, CHUNK, VALUE_DIM, TILE)
    if tl.max(live.to(tl.int32), 0) > 0:
        j = tl.arange(0, CHUNK)[None, :]
        start = head.to(tl.int64) * num_tokens + begin
        place = start + at
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        lower = tl.zeros((CHUNK, CHUNK), tl.float32)
        for base in range(0, KEY_DIM, TILE):
            queries = load_rows(q, token, live, head // GROUP, base + d, KEY_DIM).to(tl.float32)
            keys = load_rows(k, token, live, head // GROUP, base + d, KEY_DIM).to(tl.float32)
            total = sum_decays(load_rows(g, token, live, head, base + d, KEY_DIM))
            ptrs = chunks.sums + place[:, None] * KEY_DIM + (base + d)[None, :]
            tl.store(ptrs, total, mask=live[:, None] & (base + d < KEY_DIM)[None, :])
            tl.debug_barrier()  # other threads' sums are read below
            for level in tl.range(0, LEVELS, num_stages=1):
                late = (i >> level & 1) == 1
                border = part * CHUNK + ((i >> level | 1) << level) - 1  # the last token ahead of it
                here = (border >= first) & (count > 0)
                border = start + tl.minimum(border, count - 1)
                sums = load_sums(chunks.sums, border, here, base + d, KEY_DIM)
                weight = tl.exp(tl.where(late[:, None], total - sums, sums - total))
                weighted = (keys * weight).to(DTYPE)
                pairs = late[:, None] & ((j >> level & 1) == 0) & (i[:, None] >> level + 1 == j >> level + 1)
                of_keys = tl.trans(weighted)
                scores += tl.where(pairs, product((queries * weight).to(DTYPE), of_keys, PRECISION), 0.0)
                lower += tl.where(pairs, product(weighted, of_keys, PRECISION), 0.0)
        squares_q = tl.zeros((CHUNK,), tl.float32)
        squares_k = tl.zeros((CHUNK,), tl.float32)
        own = tl.zeros((CHUNK,), tl.float32)
        for base in range(0, KEY_DIM, TILE):  # by themselves: together they do not fit into registers
            queries = load_rows(q, token, live, head // GROUP, base + d, KEY_DIM).to(tl.float32)
            keys = load_rows(k, token, live, head // GROUP, base + d, KEY_DIM).to(tl.float32)
            if NORMALIZE:
                squares_q += tl.sum(queries * queries, 1)
                squares_k += tl.sum(keys * keys, 1)
            own += tl.sum(queries * keys, 1)
        factor = tl.full((CHUNK,), 1.0, tl.float32)
        if beta.ptr is not None:
            factor = load_gate(beta, token, live, head)
        norm_q = tl.full((CHUNK,), 1.0, tl.float32) * scale
        norm_k = tl.full((CHUNK,), 1.0, tl.float32)
        if NORMALIZE:
            norm_q *= tl.rsqrt(squares_q + EPS)
            norm_k = tl.rsqrt(squares_k + EPS)
        scores = tl.where(i[:, None] == j, own[:, None], scores) * norm_q[:, None] * norm_k[None, :]
        scores_ptrs = chunks.scores + place[:, None] * CHUNK + j
        tl.store(scores_ptrs, scores.to(DTYPE), mask=live[:, None])
        lower *= (factor * norm_k)[:, None] * norm_k[None, :]
        store_solved(lower, factor, chunks, place, live, CHUNK, NORMALIZE, PRECISION)
        end = start + tl.minimum(part * CHUNK + CHUNK, count) - 1 + tl.zeros_like(place)
        for base in range(0, KEY_DIM, TILE):
            queries = load_rows(q, token, live, head // GROUP, base + d, KEY_DIM).to(tl.float32)
            keys = (
                load_rows(k, token, live, head // GROUP, base + d, KEY_DIM).to(tl.float32) * norm_k[:, None]
            )
            total = load_sums(chunks.sums, place, live, base + d, KEY_DIM)
            last = load_sums(chunks.sums, end, live, base + d, KEY_DIM)
            since = tl.exp(total)
            inside = live[:, None] & (base + d < KEY_DIM)[None, :]
            to = place[:, None] * KEY_DIM + (base + d)[None, :]
            tl.store(chunks.seen + to, (keys * since).to(DTYPE), mask=inside)
            tl.store(chunks.since + to, (queries * norm_q[:, None] * since).to(DTYPE), mask=inside)
            tl.store(chunks.left + to, (keys * tl.exp(last - total)).to(DTYPE), mask=inside)
