"""The first of two kernels of long rows: what a chunk's tokens are to each other, all chunks side by side.

Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), section 3.3; Dao, Gu,
"Transformers are SSMs" (arXiv:2405.21060), section 6. With G the sums of a chunk's decays, the delta rule's
updates u of a chunk that begins with the state S are ``T beta (v - exp(G) k S)``, where T is the inverse of
``1 + L`` and L the products of keys below the diagonal, times ``beta exp(G_i - G_j)``.
"""

import triton
import triton.language as tl

from torchpaged.custom_ops.state.triton.rows import EPS, row_of
from torchpaged.custom_ops.triton.find_row import find_row_of_tile
from torchpaged.custom_ops.triton.interpreter import as_numbers

#: Of a token: below it nothing of a state is left, and sums of it and of others stay exact enough.
LEAST_DECAY = tl.constexpr(-100.0)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Of two matrices, in float32."""
    return tl.dot(as_numbers(a), as_numbers(b), input_precision=PRECISION)


@triton.jit
def chunk_of(tile, batch, num_reqs, num_tokens, SIZES: tl.constexpr):
    """Of a chunk: its number in its row, the row's first token, its tokens and how many of them are padding;
    ``[chunk]``, which of the chunk's tokens a state sees, and which get zeros: padding, rows without a slot,
    and what is behind the last row. Rows of at most ``short`` tokens are another kernel's."""
    CHUNK: tl.constexpr = SIZES.chunk
    req, part = find_row_of_tile(tile, batch.starts, num_reqs, CHUNK)
    begin, count, first, _, _ = row_of(req, batch)
    at = part * CHUNK + tl.arange(0, CHUNK)
    live = (at >= first) & (at < count) & (count > SIZES.short)
    end = tl.where(req == num_reqs - 1, num_tokens - begin, count)
    void = (at < end) & ~live & ((at >= count) | (count > SIZES.short))
    return part, begin.to(tl.int64), count, first, live, void


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
def sum_decays(decay):
    """From the first token of a chunk on; finite, since sums are subtracted from each other."""
    return tl.cumsum(tl.maximum(decay, LEAST_DECAY, propagate_nan=tl.PropagateNan.ALL), 0)


@triton.jit
def inverse(lower, DTYPE: tl.constexpr, SIZES: tl.constexpr):
    """The inverse of ``1 + lower``; that is zero on its diagonal and above. Of blocks of 2 it is the block
    with its corner negated; then blocks of twice the size, each from two: the corner is ``-b^-1 c a^-1``.
    DTYPE: of what is multiplied."""
    CHUNK: tl.constexpr = SIZES.chunk
    PRECISION: tl.constexpr = SIZES.precision
    LEVELS: tl.constexpr = 4 + (CHUNK >= 32) + (CHUNK >= 64)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    result = tl.where(i == j, 1.0, tl.where(i >> 1 == j >> 1, -lower, 0.0))
    for half in range(1, LEVELS):  # a loop, since by itself the compiler has several levels in registers
        corner = tl.where((i >> half != j >> half) & (i >> half + 1 == j >> half + 1), lower, 0.0)
        blocks = result.to(DTYPE)
        result -= product(product(blocks, corner.to(DTYPE), PRECISION).to(DTYPE), blocks, PRECISION)
    return result


@triton.jit
def store_zeros(out, token, void, head, d, SIZES: tl.constexpr):
    """``out`` of tokens that have no state."""
    CHUNK: tl.constexpr = SIZES.chunk
    TILE: tl.constexpr = SIZES.tile
    nothing = tl.zeros((CHUNK, TILE), out.ptr.dtype.element_ty)
    for base in range(0, SIZES.value_dim, TILE):
        ptrs = out.ptr + token[:, None] * out.token + head * out.head + (base + d)[None, :]
        tl.store(ptrs, nothing, mask=void[:, None] & (base + d < SIZES.value_dim)[None, :])


@triton.jit
def store_square(ptr, origin, square, live, CHUNK: tl.constexpr):
    """``[CHUNK, CHUNK]``, a row for each token from ``origin`` on."""
    i = tl.arange(0, CHUNK)
    ptrs = ptr + origin * CHUNK + (i[:, None] * CHUNK + i[None, :])
    tl.store(ptrs, square.to(ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def store_solved(lower, factor, chunks, origin, live, SIZES: tl.constexpr):
    """``solved`` of `Chunks`. Between keys that are normalised, nothing is too large for float16."""
    DTYPE: tl.constexpr = chunks.scores.dtype.element_ty
    HALF: tl.constexpr = SIZES.normalize and DTYPE.is_bf16()
    solved = inverse(lower, tl.float16 if HALF else tl.float32, SIZES) * factor[None, :]
    store_square(chunks.solved, origin, solved, live, SIZES.chunk)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def chunk_kernel(num_reqs, num_tokens, scale, q, k, g, beta, batch, out, chunks, SIZES: tl.constexpr):
    """Grid: (chunks * heads,), heads fastest; ``q, k, out``: `Tokens`; SIZES: `Sizes`."""
    CHUNK: tl.constexpr = SIZES.chunk
    PRECISION: tl.constexpr = SIZES.precision
    head = tl.program_id(0) % SIZES.heads
    part, begin, _, _, live, void = chunk_of(
        tl.program_id(0) // SIZES.heads, batch, num_reqs, num_tokens, SIZES
    )
    i = tl.arange(0, CHUNK)
    token = begin + part * CHUNK + i
    d = tl.arange(0, SIZES.tile)
    if tl.max(void.to(tl.int32), 0) > 0:
        store_zeros(out, token, void, head, d, SIZES)
    if tl.max(live.to(tl.int32), 0) > 0:
        origin = head.to(tl.int64) * num_tokens + begin + part * CHUNK
        place = origin + i
        total = sum_decays(load_gate(g, token, live, head))
        factor = tl.full((CHUNK,), 1.0, tl.float32)
        if beta.ptr is not None:
            factor = load_gate(beta, token, live, head)
        DTYPE: tl.constexpr = chunks.scores.dtype.element_ty
        squares_q = tl.zeros((CHUNK,), tl.float32)
        squares_k = tl.zeros((CHUNK,), tl.float32)
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        lower = tl.zeros((CHUNK, CHUNK), tl.float32)
        # one stage: Triton copies the next rows to where products still read these (tests/support/ttgir.py)
        for base in tl.range(0, SIZES.key_dim, SIZES.tile, num_stages=1):
            queries = load_rows(q, token, live, head // SIZES.group, base + d, SIZES.key_dim)
            keys = load_rows(k, token, live, head // SIZES.group, base + d, SIZES.key_dim)
            scores += product(queries.to(DTYPE), tl.trans(keys.to(DTYPE)), PRECISION)
            if SIZES.delta:
                lower += product(keys.to(DTYPE), tl.trans(keys.to(DTYPE)), PRECISION)
            if SIZES.normalize:
                wide_q, wide_k = queries.to(tl.float32), keys.to(tl.float32)
                squares_q += tl.sum(wide_q * wide_q, 1)
                squares_k += tl.sum(wide_k * wide_k, 1)
        norm_q = tl.full((CHUNK,), 1.0, tl.float32) * scale
        norm_k = tl.full((CHUNK,), 1.0, tl.float32)
        if SIZES.normalize:
            norm_q *= tl.rsqrt(squares_q + EPS)
            norm_k = tl.rsqrt(squares_k + EPS)
        gone = total[:, None] - total[None, :]
        decays = tl.exp(tl.where(i[:, None] >= i[None, :], gone, float("-inf")))
        last = tl.sum(tl.where(i == CHUNK - 1, total, 0.0), 0)
        # without the delta rule u is beta v, so that beta is a factor of the token's key
        of_key = norm_k if SIZES.delta else norm_k * factor
        tl.store(chunks.left + place, tl.exp(last - total) * of_key, mask=live)
        since = tl.exp(total)
        tl.store(chunks.since + place, since * norm_q, mask=live)
        whole = tl.exp(last) + tl.zeros_like(norm_k)
        tl.store(chunks.decay + place, whole, mask=live)
        scores *= decays * norm_q[:, None] * of_key[None, :]
        store_square(chunks.scores, origin, scores, live, CHUNK)
        if SIZES.delta:
            lower *= decays * (factor * norm_k)[:, None] * norm_k[None, :]
            lower = tl.where(i[:, None] > i[None, :], lower, 0.0)
            store_solved(lower, factor, chunks, origin, live, SIZES)
            tl.store(chunks.seen + place, since * norm_k, mask=live)
