"""The first of two kernels of long rows: what a chunk's tokens are to each other, all chunks side by side.

Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), section 3.3; Dao, Gu,
"Transformers are SSMs" (arXiv:2405.21060), section 6. With G the sums of a chunk's decays, the delta rule's
updates u of a chunk that begins with the state S are ``T (beta v) - T (beta exp(G) k) S``, where T is the
inverse of ``1 + L`` and L the products of keys below the diagonal, times ``beta exp(G_i - G_j)``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchpaged.custom_ops.state.triton.causal_conv import row_of
from torchpaged.custom_ops.triton.find_row import find_row_of_tile
from torchpaged.custom_ops.triton.interpreter import as_numbers


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Of two matrices, in float32."""
    return tl.dot(as_numbers(a), as_numbers(b), input_precision=PRECISION)


@triton.jit
def load_rows(x, token, live, head, dim, WIDTH: tl.constexpr):
    """``[tokens, dims]`` of `Tokens`; zeros where there are none."""
    ptrs = x.ptr + token[:, None] * x.token + head * x.head + dim[None, :]
    return tl.load(ptrs, mask=live[:, None] & (dim < WIDTH)[None, :], other=0.0)


@triton.jit
def load_gate(x, token, live, head):
    """``[tokens]`` of `Matrix`; zeros where there are none."""
    return tl.load(x.ptr + token * x.row + head, mask=live, other=0.0).to(tl.float32)


@triton.jit
def inverse(lower, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of ``1 + lower``; that is zero on its diagonal and above. Blocks of 16 by substitution, all
    at once; then blocks of twice the size, each from two: the corner is ``-b^-1 c a^-1``."""
    BLOCKS: tl.constexpr = CHUNK // 16
    LEVELS: tl.constexpr = 4 + (BLOCKS >= 2) + (BLOCKS >= 4)
    block, n = tl.arange(0, BLOCKS), tl.arange(0, 16)
    own = block[:, None, None, None] == block[None, None, :, None]
    square = tl.reshape(lower, (BLOCKS, 16, BLOCKS, 16))
    small = tl.sum(tl.where(own, square, 0.0), 2)  # [blocks, rows, columns]
    solved = tl.where(n[:, None] == n[None, :], 1.0, 0.0)[None] + tl.zeros_like(small)
    for i in range(1, 16):
        at = (n == i)[None, :, None]
        row = tl.sum(tl.where(at, small, 0.0), 1)  # [blocks, columns]
        new = tl.sum(row[:, :, None] * solved, 1)
        solved = tl.where(at, solved - new[:, None, :], solved)
    result = tl.where(own, solved[:, :, None, :], 0.0)
    result = tl.reshape(result, (CHUNK, CHUNK))
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    for half in range(4, LEVELS):  # a loop, since by itself the compiler has several levels in registers
        corner = tl.where((i >> half != j >> half) & (i >> half + 1 == j >> half + 1), lower, 0.0)
        result -= product(product(result, corner, PRECISION), result, PRECISION)
    return result


@triton.jit
def store_zeros(out, token, void, head, d, CHUNK: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr):
    """``out`` of tokens that have no state."""
    nothing = tl.zeros((CHUNK, TILE), out.ptr.dtype.element_ty)
    for base in range(0, VALUE_DIM, TILE):
        ptrs = out.ptr + token[:, None] * out.token + head * out.head + (base + d)[None, :]
        tl.store(ptrs, nothing, mask=void[:, None] & (base + d < VALUE_DIM)[None, :])


@triton.jit
def store_updates(
    solved,
    of_value,
    of_key,
    k,
    v,
    chunks,
    token,
    place,
    live,
    head,
    d,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``u`` and ``w`` of `Chunks`: values and keys times ``solved``, each with its token's factor."""
    DTYPE: tl.constexpr = chunks.scores.dtype.element_ty
    by_value = (solved * of_value[None, :]).to(DTYPE)
    by_key = (solved * of_key[None, :]).to(DTYPE)
    for base in range(0, VALUE_DIM, TILE):
        values = load_rows(v, token, live, head, base + d, VALUE_DIM).to(DTYPE)
        u = product(by_value, values, PRECISION).to(DTYPE)
        u_ptrs = chunks.u + place[:, None] * VALUE_DIM + (base + d)[None, :]
        tl.store(u_ptrs, u, mask=live[:, None] & (base + d < VALUE_DIM)[None, :])
    for base in range(0, KEY_DIM, TILE):
        keys = load_rows(k, token, live, head // GROUP, base + d, KEY_DIM).to(DTYPE)
        w = product(by_key, keys, PRECISION).to(DTYPE)
        w_ptrs = chunks.w + place[:, None] * KEY_DIM + (base + d)[None, :]
        tl.store(w_ptrs, w, mask=live[:, None] & (base + d < KEY_DIM)[None, :])


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def chunk_kernel(
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
    """Grid: (chunks * NUM_HEADS,), heads fastest; ``q, k, v, out``: `Tokens`. Rows of at most SHORT tokens
    are another kernel's. All other tokens without a state get zeros, those behind the last row too."""
    head = tl.program_id(0) % NUM_HEADS
    req, part = find_row_of_tile(tl.program_id(0) // NUM_HEADS, batch.starts, num_reqs, CHUNK)
    begin, count, first, _, _ = row_of(req, batch)
    i = tl.arange(0, CHUNK)
    at = part * CHUNK + i
    live = (at >= first) & (at < count) & (count > SHORT)
    token = begin.to(tl.int64) + at
    end = tl.where(req == num_reqs - 1, num_tokens - begin, count)
    void = (at < end) & ~live & ((at >= count) | (count > SHORT))
    d = tl.arange(0, TILE)
    if tl.max(void.to(tl.int32), 0) > 0:
        store_zeros(out, token, void, head, d, CHUNK, VALUE_DIM, TILE)
    if tl.max(live.to(tl.int32), 0) > 0:
        place = head.to(tl.int64) * num_tokens + token
        decay = tl.maximum(load_gate(g, token, live, head), -1000.0, propagate_nan=tl.PropagateNan.ALL)
        total = tl.cumsum(decay.to(tl.float64), 0)  # from which others are subtracted; finite, thus
        factor = tl.full((CHUNK,), 1.0, tl.float32)
        if beta.ptr is not None:
            factor = load_gate(beta, token, live, head)
        DTYPE: tl.constexpr = chunks.scores.dtype.element_ty
        squares_q = tl.zeros((CHUNK,), tl.float32)
        squares_k = tl.zeros((CHUNK,), tl.float32)
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        lower = tl.zeros((CHUNK, CHUNK), tl.float32)
        for base in range(0, KEY_DIM, TILE):
            queries = load_rows(q, token, live, head // GROUP, base + d, KEY_DIM)
            keys = load_rows(k, token, live, head // GROUP, base + d, KEY_DIM)
            scores += product(queries.to(DTYPE), tl.trans(keys.to(DTYPE)), PRECISION)
            if DELTA:
                lower += product(keys.to(DTYPE), tl.trans(keys.to(DTYPE)), PRECISION)
            if NORMALIZE:
                wide_q, wide_k = queries.to(tl.float32), keys.to(tl.float32)
                squares_q += tl.sum(wide_q * wide_q, 1)
                squares_k += tl.sum(wide_k * wide_k, 1)
        norm_q = tl.full((CHUNK,), 1.0, tl.float32) * scale
        norm_k = tl.full((CHUNK,), 1.0, tl.float32)
        if NORMALIZE:
            norm_q *= tl.rsqrt(squares_q + EPS)
            norm_k = tl.rsqrt(squares_k + EPS)
        high = total.to(tl.float32)
        low = (total - high).to(tl.float32)
        gone = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        decays = tl.exp(tl.where(i[:, None] >= i[None, :], gone, float("-inf")))
        last = tl.sum(tl.where(i == CHUNK - 1, total, 0.0), 0)
        # without the delta rule u is beta v, so that beta is a factor of the token's key
        of_key = norm_k if DELTA else norm_k * factor
        tl.store(chunks.left + place, tl.exp((last - total).to(tl.float32)) * of_key, mask=live)
        since = tl.exp(total.to(tl.float32))
        tl.store(chunks.since + place, since * norm_q, mask=live)
        whole = tl.exp(last.to(tl.float32)) + tl.zeros_like(norm_k)
        tl.store(chunks.decay + place, whole, mask=live)
        scores *= decays * norm_q[:, None] * of_key[None, :]
        scores_ptrs = chunks.scores + place[:, None] * CHUNK + i[None, :]
        tl.store(scores_ptrs, scores.to(DTYPE), mask=live[:, None])
        if DELTA:
            lower *= decays * (factor * norm_k)[:, None] * norm_k[None, :]
            lower = tl.where(i[:, None] > i[None, :], lower, 0.0)
            store_updates(
                inverse(lower, CHUNK, PRECISION),
                factor,
                factor * norm_k * since,
                k,
                v,
                chunks,
                token,
                place,
                live,
                head,
                d,
                GROUP,
                KEY_DIM,
                VALUE_DIM,
                TILE,
                PRECISION,
            )
