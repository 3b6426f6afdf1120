"""linear_attention of one token per row: a program per row, head and tile of value columns, which reads its
part of the state once and asks for all else that it reads before the state has come.

With S before the token, S' behind it and k' = exp(g) k, q' = exp(g) q: S^T k' and S^T q' are one pass over
S, and out = S'^T q = S^T q' + (k . q) u.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchpaged.custom_ops.state.triton.causal_conv import row_of


@triton.jit
def add_pairs(a0, a1, b0, b1):
    """Two sums in one reduction."""
    return a0 + b0, a1 + b1


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def linear_decode_kernel(
    num_reqs,
    num_tokens,
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    state_ptr,
    slots_ptr,
    lens_ptr,
    starts_ptr,
    out_ptr,
    beta_ptr,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_head,
    beta_token,
    state_slot,
    state_head,
    state_row,
    out_token,
    out_head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_VALUE: tl.constexpr,
    BY_KEY: tl.constexpr,
    DELTA: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Grid, GROUP and BY_KEY as of ``recurrent_kernel``; EVICT: what L2 is told of states."""
    VALUE_TILES: tl.constexpr = (VALUE_DIM + TILE_VALUE - 1) // TILE_VALUE
    pid = tl.program_id(0)
    head = pid // VALUE_TILES % NUM_HEADS
    req = pid // (VALUE_TILES * NUM_HEADS)
    begin, count, first, slot, seq_len = row_of(req, slots_ptr, lens_ptr, starts_ptr)
    live, token = first < count, begin.to(tl.int64)
    n = tl.arange(0, KEY_PAD)
    d = pid % VALUE_TILES * TILE_VALUE + tl.arange(0, TILE_VALUE)
    of_key, of_value = (n < KEY_DIM) & live, (d < VALUE_DIM) & live
    place = state_ptr + slot * state_slot + head * state_head + n[:, None] * state_row + d[None, :]
    inside = of_key[:, None] & of_value[None, :]
    state = tl.load(place, mask=inside & (seq_len > count), other=0.0, eviction_policy=EVICT)
    q = tl.load(q_ptr + token * q_token + head // GROUP * q_head + n, mask=of_key, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + token * k_token + head // GROUP * k_head + n, mask=of_key, other=0.0).to(tl.float32)
    u = tl.load(v_ptr + token * v_token + head * v_head + d, mask=of_value, other=0.0).to(tl.float32)
    g = g_ptr + token * g_token + head * g_head
    decay = tl.exp(tl.load(g + n, mask=of_key, other=0.0) if BY_KEY else tl.load(g, mask=live, other=0.0))
    beta = 1.0
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + token * beta_token + head, mask=live, other=0.0).to(tl.float32)
    if NORMALIZE:
        kk, qq = tl.reduce((k * k, q * q), 0, add_pairs)
        k *= tl.rsqrt(kk + EPS)
        q *= tl.rsqrt(qq + EPS)
    q *= scale
    kq = tl.sum(k * q, axis=0)
    state = state.to(tl.float32)
    left_q, left_k = (decay * q)[:, None], (decay * k)[:, None]
    if DELTA:
        seen, y = tl.reduce((state * left_k, state * left_q), 0, add_pairs)
        u -= seen
    else:
        y = tl.sum(state * left_q, axis=0)
    u *= beta
    y += kq * u
    state = state * (decay[:, None] if BY_KEY else decay) + k[:, None] * u[None, :]
    tl.store(place, state.to(state_ptr.dtype.element_ty), mask=inside, eviction_policy=EVICT)
    # Zeros for a token whose row has no slot, and for those behind the last row, which its programs have.
    out_ptr += head * out_head + d
    end = tl.where(req == num_reqs - 1, num_tokens - begin, count)
    for i in range(end):
        out = tl.where(live & (i < count), y, 0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (token + i) * out_token, out, mask=d < VALUE_DIM)
