"""Decode attention: split-KV with the query heads of a kv head as the rows of one dot ("flash decoding", GQA-packed).

A program owns (request, kv head, split). The number of splits comes from shapes; which keys a split reads is computed on the
device from ``seq_lens``: a captured launch serves every length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchpaged.custom_ops.triton.attend import attend, finish, visible_range


@triton.jit
def store_rows(
    out_ptr, lse_ptr, out, lse, token, head, valid, o_token, o_head, l_token, l_head,
    DIM_V: tl.constexpr, DIM_V_PAD: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Write ``out [M, DV]`` and ``lse [M]`` of rows (token, head)."""
    dv = tl.arange(0, DIM_V_PAD)
    at = out_ptr + (token.to(tl.int64) * o_token + head * o_head)[:, None] + dv[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (dv < DIM_V)[None, :])
    if HAS_LSE:
        tl.store(lse_ptr + token.to(tl.int64) * l_token + head * l_head, lse, mask=valid)


@triton.jit
def store_padding(
    out_ptr, lse_ptr, starts_ptr, first, step, num_reqs, num_tokens, head, valid, o_token, o_head, l_token, l_head,
    TILE_M: tl.constexpr, DIM_V: tl.constexpr, DIM_V_PAD: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Token rows after the last request's: zeros and -inf, shared out over the programs."""
    used = tl.load(starts_ptr + num_reqs)
    zero = tl.zeros([TILE_M, DIM_V_PAD], tl.float32)
    nothing = tl.full([TILE_M], float("-inf"), tl.float32)
    for token in range(used + first, num_tokens, step):
        rows = tl.zeros([TILE_M], tl.int32) + token
        store_rows(out_ptr, lse_ptr, zero, nothing, rows, head, valid, o_token, o_head, l_token, l_head, DIM_V, DIM_V_PAD, HAS_LSE)


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, starts_ptr, out_ptr, lse_ptr, slopes_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    part_acc_ptr, part_state_ptr,
    scale, soft_cap, num_reqs, num_tokens, num_splits,
    q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, o_token, o_head, l_token, l_head, table_row, ks_head, vs_head,
    GROUP: tl.constexpr, QUERY_LEN: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V: tl.constexpr,
    DIM_V_PAD: tl.constexpr, TILE_M: tl.constexpr, TILE_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr, WINDOW_RIGHT: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, KV_SCALES: tl.constexpr, HAS_LSE: tl.constexpr, DIRECT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid: (num_reqs, num_kv_heads, num_splits). DIRECT: one split, write the result at once."""
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + request)
    query_len = tl.load(starts_ptr + request + 1) - start
    seq_len = tl.load(seq_lens_ptr + request)
    row = tl.arange(0, TILE_M)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = (query < query_len) & (query < QUERY_LEN)
    position = seq_len - query_len + query
    low, end = visible_range(position, seq_len, WINDOW_LEFT, WINDOW_RIGHT, CHUNK, CAUSAL)
    end = tl.where(valid, end, low)
    sees = end > low
    first_key = tl.min(tl.where(sees, low, 2147483647), 0)
    end_key = tl.max(tl.where(sees, end, 0), 0)
    first_key = tl.minimum(first_key, end_key)
    # Splits in whole tiles, as even as tiles allow.
    tiles = (end_key - first_key + TILE_KV - 1) // TILE_KV
    split_first = first_key + tiles * split // num_splits * TILE_KV
    split_end = tl.minimum(first_key + tiles * (split + 1) // num_splits * TILE_KV, end_key)
    d = tl.arange(0, DIM_PAD)
    at = q_ptr + ((start + query).to(tl.int64) * q_token + head * q_head)[:, None] + d[None, :]
    q = tl.load(at, mask=valid[:, None] & (d < DIM)[None, :], other=0.0)  # [M, D]
    if INTERPRET:
        q = q.to(tl.float32)
    slope = tl.zeros([TILE_M], tl.float32)
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=valid, other=0.0)
    score_scale = scale
    v_scale = 1.0
    if KV_SCALES:
        score_scale = scale * tl.load(k_scale_ptr + kv_head * ks_head)
        v_scale = tl.load(v_scale_ptr + kv_head * vs_head)
    maximum, total, acc = attend(
        q, position, low, end, slope, split_first, split_end, table_ptr + request.to(tl.int64) * table_row,
        k_ptr + kv_head.to(tl.int64) * k_head, v_ptr + kv_head.to(tl.int64) * v_head, k_block, k_slot, v_block, v_slot,
        score_scale, soft_cap, DIM, DIM_PAD, DIM_V, DIM_V_PAD, TILE_M, TILE_KV, BLOCK_SIZE, SOFT_CAP, ALIBI, INTERPRET,
    )  # fmt: skip
    if DIRECT:
        sink = tl.zeros([TILE_M], tl.float32)
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32)
        out, lse = finish(maximum, total, acc, sink, v_scale, SINKS)
        store_rows(out_ptr, lse_ptr, out, lse, start + query, head, valid, o_token, o_head, l_token, l_head, DIM_V, DIM_V_PAD, HAS_LSE)
        store_padding(
            out_ptr, lse_ptr, starts_ptr, request, num_reqs, num_reqs, num_tokens, head, row < GROUP, o_token, o_head, l_token, l_head,
            TILE_M, DIM_V, DIM_V_PAD, HAS_LSE,
        )  # fmt: skip
    else:
        part = (request.to(tl.int64) * tl.num_programs(1) + kv_head) * num_splits + split
        dv = tl.arange(0, DIM_V_PAD)
        tl.store(part_acc_ptr + (part * TILE_M + row)[:, None] * DIM_V_PAD + dv[None, :], acc)
        tl.store(part_state_ptr + part * 2 * TILE_M + row, maximum)
        tl.store(part_state_ptr + part * 2 * TILE_M + TILE_M + row, total)


@triton.jit
def merge_kernel(
    starts_ptr, out_ptr, lse_ptr, sinks_ptr, v_scale_ptr, part_acc_ptr, part_state_ptr, num_reqs, num_tokens, num_splits,
    o_token, o_head, l_token, l_head, vs_head,
    GROUP: tl.constexpr, QUERY_LEN: tl.constexpr, DIM_V: tl.constexpr, DIM_V_PAD: tl.constexpr, TILE_M: tl.constexpr,
    SINKS: tl.constexpr, KV_SCALES: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Grid: (num_reqs, num_kv_heads): combine the splits' states of one request and kv head (arXiv:2501.01005, section 2.2)."""
    request, kv_head = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts_ptr + request)
    query_len = tl.load(starts_ptr + request + 1) - start
    row = tl.arange(0, TILE_M)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = (query < query_len) & (query < QUERY_LEN)
    dv = tl.arange(0, DIM_V_PAD)
    maximum = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, DIM_V_PAD], tl.float32)
    first = (request.to(tl.int64) * tl.num_programs(1) + kv_head) * num_splits
    for split in range(num_splits):
        part = first + split
        part_max = tl.load(part_state_ptr + part * 2 * TILE_M + row)
        part_total = tl.load(part_state_ptr + part * 2 * TILE_M + TILE_M + row)
        part_acc = tl.load(part_acc_ptr + (part * TILE_M + row)[:, None] * DIM_V_PAD + dv[None, :])
        top = tl.maximum(maximum, part_max)
        safe = tl.where(top == float("-inf"), 0.0, top)
        shrink, weight = tl.exp2(maximum - safe), tl.exp2(part_max - safe)
        total = total * shrink + part_total * weight
        acc = acc * shrink[:, None] + part_acc * weight[:, None]
        maximum = top
    sink = tl.zeros([TILE_M], tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32)
    v_scale = 1.0
    if KV_SCALES:
        v_scale = tl.load(v_scale_ptr + kv_head * vs_head)
    out, lse = finish(maximum, total, acc, sink, v_scale, SINKS)
    store_rows(out_ptr, lse_ptr, out, lse, start + query, head, valid, o_token, o_head, l_token, l_head, DIM_V, DIM_V_PAD, HAS_LSE)
    store_padding(
        out_ptr, lse_ptr, starts_ptr, request, num_reqs, num_reqs, num_tokens, head, row < GROUP, o_token, o_head, l_token, l_head,
        TILE_M, DIM_V, DIM_V_PAD, HAS_LSE,
    )  # fmt: skip
