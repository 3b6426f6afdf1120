"""Prefill and mixed attention: a program owns a tile of query tokens of one request and one kv head.

The grid is an upper bound from shapes; each program finds its request by bisection of ``query_start_loc`` on the device, so
that prefill, chunked prefill and decodes share one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchpaged.custom_ops.triton.attend import attend, finish, visible_range
from torchpaged.custom_ops.triton.decode import store_padding, store_rows


@triton.jit
def find_request(starts_ptr, tile, num_reqs, TOKENS: tl.constexpr):
    """The request that query tile ``tile`` belongs to: request r's tiles begin at ``starts[r] // TOKENS + r``."""
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, starts_ptr, out_ptr, lse_ptr, slopes_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    scale, soft_cap, num_reqs, num_tokens,
    q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, o_token, o_head, l_token, l_head, table_row, ks_head, vs_head,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V: tl.constexpr,
    DIM_V_PAD: tl.constexpr, TILE_M: tl.constexpr, TILE_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr, WINDOW_RIGHT: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, KV_SCALES: tl.constexpr, HAS_LSE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid: (num_tokens // TOKENS + num_reqs, num_kv_heads). TOKENS: query tokens per tile, TOKENS * GROUP <= TILE_M."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, TILE_M)
    head = kv_head * GROUP + row % GROUP
    store_padding(
        out_ptr, lse_ptr, starts_ptr, tile, tl.num_programs(0), num_reqs, num_tokens, head, row < GROUP, o_token, o_head, l_token, l_head,
        TILE_M, DIM_V, DIM_V_PAD, HAS_LSE,
    )  # fmt: skip
    request = find_request(starts_ptr, tile, num_reqs, TOKENS)
    start = tl.load(starts_ptr + request)
    query_len = tl.load(starts_ptr + request + 1) - start
    first_query = (tile - (start // TOKENS + request)) * TOKENS
    if first_query < query_len:
        seq_len = tl.load(seq_lens_ptr + request)
        query = first_query + row // GROUP
        valid = (query < query_len) & (row < TOKENS * GROUP)
        position = seq_len - query_len + query
        low, end = visible_range(position, seq_len, WINDOW_LEFT, WINDOW_RIGHT, CHUNK, CAUSAL)
        end = tl.where(valid, end, low)
        sees = end > low
        first_key = tl.min(tl.where(sees, low, 2147483647), 0)
        end_key = tl.max(tl.where(sees, end, 0), 0)
        first_key = tl.minimum(first_key, end_key)
        d = tl.arange(0, DIM_PAD)
        at = q_ptr + ((start + query).to(tl.int64) * q_token + head * q_head)[:, None] + d[None, :]
        q = tl.load(at, mask=valid[:, None] & (d < DIM)[None, :], other=0.0)  # [M, D]
        if INTERPRET:
            q = q.to(tl.float32)
        slope = tl.zeros([TILE_M], tl.float32)
        if ALIBI:
            slope = tl.load(slopes_ptr + head, mask=valid, other=0.0)
        sink = tl.zeros([TILE_M], tl.float32)
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32)
        score_scale = scale
        v_scale = 1.0
        if KV_SCALES:
            score_scale = scale * tl.load(k_scale_ptr + kv_head * ks_head)
            v_scale = tl.load(v_scale_ptr + kv_head * vs_head)
        maximum, total, acc = attend(
            q, position, low, end, slope, first_key, end_key, table_ptr + request.to(tl.int64) * table_row,
            k_ptr + kv_head.to(tl.int64) * k_head, v_ptr + kv_head.to(tl.int64) * v_head, k_block, k_slot, v_block, v_slot,
            score_scale, soft_cap, DIM, DIM_PAD, DIM_V, DIM_V_PAD, TILE_M, TILE_KV, BLOCK_SIZE, SOFT_CAP, ALIBI, INTERPRET,
        )  # fmt: skip
        out, lse = finish(maximum, total, acc, sink, v_scale, SINKS)
        store_rows(out_ptr, lse_ptr, out, lse, start + query, head, valid, o_token, o_head, l_token, l_head, DIM_V, DIM_V_PAD, HAS_LSE)
