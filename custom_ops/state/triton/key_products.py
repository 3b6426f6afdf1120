"""The first of two kernels of long rows whose keys' columns decay one by one, as in Kimi delta attention:
what `chunk_products` is to rows with a decay for each head.

Source: Kimi Team, "Kimi Linear" (arXiv:2510.26692), section 3. With G the sums of a chunk's decays, a pair of
tokens weighs ``sum_d q_id k_jd exp(G_id - G_jd)``, and neither ``exp(G_i)`` nor ``exp(-G_j)`` need be a
number. But where no column's sums are further apart than `WIDEST`, ``exp(G_i - R)`` and ``exp(R - G_j)`` are,
with R in the middle: all pairs are one product of matrices. A chunk where some are is halved until its blocks
are as narrow; of the pairs whose tokens a border of halves parts, all exponents are taken from that border,
below 0 on both sides, and all pairs of a level are one product.
"""

import triton
import triton.language as tl

from torchpaged.custom_ops.state.triton.chunk_products import (
    chunk_of,
    load_gate,
    load_rows,
    product,
    store_solved,
    store_square,
    store_zeros,
    sum_decays,
)
from torchpaged.custom_ops.state.triton.rows import EPS

#: Distance of sums up to which exponents of both signs are numbers of bfloat16, and so are weighted keys.
WIDEST = tl.constexpr(160.0)


@triton.jit
def sums_of(sums, at, first, count, start, d, TILE: tl.constexpr):
    """``[tokens, TILE]``, decays' sums at tokens of a row, as this column tile stored them; those of padding
    are their neighbours'."""
    here = (at >= first) & (count > 0)
    ptrs = sums + (start + tl.minimum(at, count - 1))[:, None] * TILE + d[None, :]
    return tl.load(ptrs, mask=here[:, None], other=0.0)


@triton.jit
def add_pairs(scores, lower, queries, keys, above, pairs, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Products of queries, and of keys, with keys, where ``pairs`` says so. ``above``: of decays' sums, those
    of what the exponents are taken from."""
    ahead = tl.exp(tl.minimum(above, 0.5 * WIDEST))
    of_keys = tl.trans((keys * tl.exp(tl.minimum(-above, 0.5 * WIDEST))).to(DTYPE))
    scores += tl.where(pairs, product((queries * ahead).to(DTYPE), of_keys, PRECISION), 0.0)
    lower += tl.where(pairs, product((keys * ahead).to(DTYPE), of_keys, PRECISION), 0.0)
    return scores, lower


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def key_chunk_kernel(num_reqs, num_tokens, scale, q, k, g, beta, batch, out, chunks, SIZES: tl.constexpr):
    """As `chunk_kernel`; ``g``: `Tokens`. With the delta rule alone."""
    CHUNK: tl.constexpr = SIZES.chunk
    TILE: tl.constexpr = SIZES.tile
    KEY_DIM: tl.constexpr = SIZES.key_dim
    PRECISION: tl.constexpr = SIZES.precision
    tl.static_assert(SIZES.delta)
    LEVELS: tl.constexpr = 4 + (CHUNK >= 32) + (CHUNK >= 64)
    DTYPE: tl.constexpr = chunks.scores.dtype.element_ty
    tile, head = tl.program_id(0) // SIZES.heads, tl.program_id(0) % SIZES.heads
    part, begin, count, first, live, void = chunk_of(tile, batch, num_reqs, num_tokens, SIZES)
    i, d = tl.arange(0, CHUNK), tl.arange(0, TILE)
    token = begin + part * CHUNK + i
    if tl.max(void.to(tl.int32), 0) > 0:
        store_zeros(out, token, void, head, d, SIZES)
    if tl.max(live.to(tl.int32), 0) > 0:
        j = tl.arange(0, CHUNK)[None, :]
        start = head.to(tl.int64) * num_tokens + begin
        origin = start + part * CHUNK
        place = origin + i
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        lower = tl.zeros((CHUNK, CHUNK), tl.float32)
        squares_q = tl.zeros((CHUNK,), tl.float32)
        squares_k = tl.zeros((CHUNK,), tl.float32)
        for base in range(0, KEY_DIM, TILE):
            queries = load_rows(q, token, live, head // SIZES.group, base + d, KEY_DIM).to(tl.float32)
            keys = load_rows(k, token, live, head // SIZES.group, base + d, KEY_DIM).to(tl.float32)
            total = sum_decays(load_rows(g, token, live, head, base + d, KEY_DIM))
            if SIZES.normalize:
                squares_q += tl.sum(queries * queries, 1)
                squares_k += tl.sum(keys * keys, 1)
            last = tl.sum(tl.where(i[:, None] == CHUNK - 1, total, 0.0), 0)
            of_key = base + d < KEY_DIM
            decay = chunks.decay + (tile * SIZES.heads + head).to(tl.int64) * KEY_DIM + base + d
            tl.store(decay, tl.exp(last), mask=of_key)
            since, inside = tl.exp(total), live[:, None] & of_key[None, :]
            to = origin * KEY_DIM + base + (i[:, None] * KEY_DIM + d[None, :])
            tl.store(chunks.queries + to, (queries * since).to(DTYPE), mask=inside)
            tl.store(chunks.known + to, (keys * since).to(DTYPE), mask=inside)
            tl.store(chunks.keys + to, (keys * tl.exp(last[None, :] - total)).to(DTYPE), mask=inside)
            apart = -tl.min(last, 0)
            if apart <= WIDEST:
                above = total - 0.5 * last[None, :]
                scores, lower = add_pairs(
                    scores, lower, queries, keys, above, i[:, None] >= 0, DTYPE, PRECISION
                )
            else:
                ptrs = chunks.sums + origin * TILE + (i[:, None] * TILE + d[None, :])
                tl.store(ptrs, total, mask=live[:, None])
                tl.debug_barrier()  # other threads' sums are read below
                widest = LEVELS - 1
                while apart > WIDEST:  # two tokens' sums are not
                    widest -= 1
                    block = part * CHUNK + (i >> widest + 1 << widest + 1)
                    begins = sums_of(chunks.sums, block, first, count, start, d, TILE)
                    ends = sums_of(chunks.sums, block + (2 << widest) - 1, first, count, start, d, TILE)
                    apart = tl.max(tl.max(begins - ends, 1), 0)
                for level in tl.range(widest, LEVELS, num_stages=1):
                    border = part * CHUNK + ((i >> level | 1) << level) - 1
                    block = part * CHUNK + (i >> level + 1 << level + 1)
                    low = tl.where(level == widest, block, border)
                    high = tl.where(level == widest, block + (2 << level) - 1, border)
                    above = total - 0.5 * sums_of(chunks.sums, low, first, count, start, d, TILE)
                    above -= 0.5 * sums_of(chunks.sums, high, first, count, start, d, TILE)
                    pairs = (i >> level + 1)[:, None] == j >> level + 1
                    pairs &= (level == widest) | ((i >> level & 1)[:, None] > (j >> level & 1))
                    scores, lower = add_pairs(scores, lower, queries, keys, above, pairs, DTYPE, PRECISION)
                tl.debug_barrier()  # before the next tile's are stored
        factor = tl.full((CHUNK,), 1.0, tl.float32)
        if beta.ptr is not None:
            factor = load_gate(beta, token, live, head)
        norm_q = tl.full((CHUNK,), 1.0, tl.float32) * scale
        norm_k = tl.full((CHUNK,), 1.0, tl.float32)
        if SIZES.normalize:
            norm_q *= tl.rsqrt(squares_q + EPS)
            norm_k = tl.rsqrt(squares_k + EPS)
        tl.store(chunks.since + place, norm_q, mask=live)
        tl.store(chunks.left + place, norm_k, mask=live)
        scores = tl.where(i[:, None] >= j, scores * norm_q[:, None] * norm_k[None, :], 0.0)
        store_square(chunks.scores, origin, scores, live, CHUNK)
        lower = tl.where(i[:, None] > j, lower * (factor * norm_k)[:, None] * norm_k[None, :], 0.0)
        store_solved(lower, factor, chunks, origin, live, SIZES)
