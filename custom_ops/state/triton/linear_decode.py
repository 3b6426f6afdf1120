"""linear_attention of one token per row: a program per row, head and tile of value columns, which reads its
part of the state once and asks for all else that it reads before the state has come.

With S before the token, S' behind it and k' = exp(g) k, q' = exp(g) q: S^T k' and S^T q' are one pass over
S, and out = S'^T q = S^T q' + (k . q) u.
"""

import triton
import triton.language as tl

from torchpaged.custom_ops.state.triton.rows import EPS, row_of


@triton.jit
def add_pairs(a0, a1, b0, b1):
    """Two sums in one reduction."""
    return a0 + b0, a1 + b1


@triton.jit
def split_decay(g):
    """exp(g), and two numbers whose sum it is: next to 1 they are 1 and exp(g) - 1. A state times exp(g),
    which is rounded alike at each token where g is constant, would lose by as much at each, in one direction;
    its sum with the state times exp(g) - 1 is rounded at random."""
    near = (g > -0.25) & (g < 0.25)
    x = tl.where(near, g, 0.0)
    less = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7))))))
    decay = tl.exp(g)
    return decay, tl.where(near, 1.0, decay), tl.where(near, less, 0.0)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def linear_decode_kernel(
    num_reqs, num_tokens, scale, q, k, v, g, beta, batch, state, out, SIZES: tl.constexpr, EVICT: tl.constexpr
):
    """Grid and records as of ``recurrent_kernel``; EVICT: what L2 is told of states."""
    VALUE_TILES: tl.constexpr = (SIZES.value_dim + SIZES.tile - 1) // SIZES.tile
    pid = tl.program_id(0)
    head = pid // VALUE_TILES % SIZES.heads
    req = pid // (VALUE_TILES * SIZES.heads)
    begin, count, first, slot, seq_len = row_of(req, batch)
    live, token = first < count, begin.to(tl.int64)
    n = tl.arange(0, SIZES.key_pad)
    d = pid % VALUE_TILES * SIZES.tile + tl.arange(0, SIZES.tile)
    of_key, of_value = (n < SIZES.key_dim) & live, (d < SIZES.value_dim) & live
    place = state.ptr + slot * state.slot + head * state.head + n[:, None] * state.row + d[None, :]
    inside = of_key[:, None] & of_value[None, :]
    matrix = tl.load(place, mask=inside & (seq_len > count), other=0.0, eviction_policy=EVICT)
    key_head = head // SIZES.group
    query = tl.load(q.ptr + token * q.token + key_head * q.head + n, mask=of_key, other=0.0).to(tl.float32)
    key = tl.load(k.ptr + token * k.token + key_head * k.head + n, mask=of_key, other=0.0).to(tl.float32)
    u = tl.load(v.ptr + token * v.token + head * v.head + d, mask=of_value, other=0.0).to(tl.float32)
    gate = g.ptr + token * g.token + head * g.head
    decay, most, rest = split_decay(
        tl.load(gate + n, mask=of_key, other=0.0) if SIZES.by_key else tl.load(gate, mask=live, other=0.0)
    )
    factor = 1.0
    if beta.ptr is not None:
        factor = tl.load(beta.ptr + token * beta.row + head, mask=live, other=0.0).to(tl.float32)
    if SIZES.normalize:
        kk, qq = tl.reduce((key * key, query * query), 0, add_pairs)
        key *= tl.rsqrt(kk + EPS)
        query *= tl.rsqrt(qq + EPS)
    query *= scale
    kq = tl.sum(key * query, axis=0)
    matrix = matrix.to(tl.float32)
    left_q, left_k = (decay * query)[:, None], (decay * key)[:, None]
    if SIZES.delta:
        seen, y = tl.reduce((matrix * left_k, matrix * left_q), 0, add_pairs)
        u -= seen
    else:
        y = tl.sum(matrix * left_q, axis=0)
    u *= factor
    y += kq * u
    new = key[:, None] * u[None, :]
    if state.ptr.dtype.element_ty == tl.float32:
        matrix = matrix * (most[:, None] if SIZES.by_key else most) + (
            matrix * (rest[:, None] if SIZES.by_key else rest) + new
        )
    else:  # its rounding hides that of the decay
        matrix = matrix * (decay[:, None] if SIZES.by_key else decay) + new
    tl.store(place, matrix.to(state.ptr.dtype.element_ty), mask=inside, eviction_policy=EVICT)
    # Zeros for a token whose row has no slot, and for those behind the last row, which its programs have.
    to = out.ptr + head * out.head + d
    end = tl.where(req == num_reqs - 1, num_tokens - begin, count)
    for i in range(end):
        value = tl.where(live & (i < count), y, 0.0).to(out.ptr.dtype.element_ty)
        tl.store(to + (token + i) * out.token, value, mask=d < SIZES.value_dim)
