"""Prefill and mixed attention: a program owns a tile of query tokens of one request and one kv head.

The grid is an upper bound from shapes; each program finds its request on the device from ``query_start_loc``, so that prefill,
chunked prefill and decodes share one launch. The rows of a tile are query tokens x heads of the group: a tile of keys is read
once for all of them. Key tiles that every row sees whole take a loop without masks; only the tiles at the ends of the rows'
intervals are masked. Programs start with the last tokens, which see the most keys, so that short tiles fill the end.

Shaped for Hopper: wgmma takes q, k and v from shared memory and p from registers, k and v arrive by cp.async. With OVERLAP the
product p @ v of a tile runs behind the softmax of the next one (FlashAttention-3, arXiv:2407.08608, section 3.2).
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchpaged.custom_ops.triton.attend import finish, tanh, visible_range
from torchpaged.custom_ops.triton.decode import store_padding, store_rows


@triton.jit
def find_request(starts_ptr, tile, num_reqs, TOKENS: tl.constexpr):
    """The request that query tile ``tile`` belongs to: request r's tiles begin at ``starts[r] // TOKENS + r``.

    Counts the requests that begin at or before ``tile``: one round of loads where bisection would wait for seven in a row.
    """
    LANES: tl.constexpr = 128
    count = 0
    for first in range(0, num_reqs, LANES):
        request = first + tl.arange(0, LANES)
        begin = tl.load(starts_ptr + request, mask=request < num_reqs, other=0) // TOKENS + request
        count += tl.sum(((begin <= tile) & (request < num_reqs)).to(tl.int32), 0)
    return count - 1


@triton.jit
def load_blocks(table_ptr, start, end_key, TILE_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Block ids of the keys ``start + [0, TILE_KV)``; 0, the null block, at and past ``end_key``."""
    n = tl.arange(0, TILE_KV)
    if TILE_KV % BLOCK_SIZE == 0:  # start is a multiple of TILE_KV: the division of n leaves the loop
        return tl.load(table_ptr + start // BLOCK_SIZE + n // BLOCK_SIZE, mask=start + n < end_key, other=0)
    return tl.load(table_ptr + (start + n) // BLOCK_SIZE, mask=start + n < end_key, other=0)


@triton.jit
def tile_of(cache_ptr, blocks, start, stride_block: tl.constexpr, stride_slot: tl.constexpr, WIDTH: tl.constexpr,
            TILE_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """Addresses ``[N, WIDTH]`` of the keys ``start + [0, TILE_KV)``. Constant strides make it two instructions per row."""
    key = tl.arange(0, TILE_KV)
    offset = key % BLOCK_SIZE if TILE_KV % BLOCK_SIZE == 0 else (start + key) % BLOCK_SIZE
    inside_block = (offset * stride_slot)[:, None] + tl.arange(0, WIDTH)[None, :]
    return cache_ptr + inside_block + (blocks.to(tl.int64) * stride_block)[:, None]


@triton.jit
def attend_tiles(
    maximum, total, acc, p, shrink, blocks, last_blocks, q, position, low, end, slope, first, last, first_key, low_key, end_key,
    table_ptr, k_ptr, v_ptr, k_block: tl.constexpr, k_slot: tl.constexpr, v_block: tl.constexpr, v_slot: tl.constexpr,
    score_scale, soft_cap,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V: tl.constexpr, DIM_V_PAD: tl.constexpr, TILE_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, LOW: tl.constexpr, FOLD: tl.constexpr,
    OVERLAP: tl.constexpr, MASKED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Keys ``[first, last)``, ``first`` a multiple of TILE_KV. Returns the state, its first seven arguments, after them.

    maximum, total [M], acc [M, DV]: the running softmax; blocks [N]: block ids of the next tile, loaded one tile ahead, so that
    the loads of keys and values are pipelined like loads from plain addresses. Unless MASKED, every row must see every key. LOW:
    rows may not see the first keys. FOLD: ``maximum`` is of raw scores, the scale joins the exponential in one multiply-add.

    OVERLAP: acc lacks the last tile, whose p [M, N], shrink [M] and last_blocks [N] are passed on. Its product with v starts
    before the softmax of the current tile and is waited for after it. p is kept in float32: converted where it is used it stays
    in registers, while a loop-carried 16-bit operand would go through shared memory and be waited for at once.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    to_base_2 = score_scale * LOG2E if FOLD else LOG2E
    key = tl.arange(0, TILE_KV)
    d = tl.arange(0, DIM_PAD)
    dv = tl.arange(0, DIM_V_PAD)
    for start in range(first, last, TILE_KV):
        k_at = tile_of(k_ptr, blocks, start, k_block, k_slot, DIM_PAD, TILE_KV, BLOCK_SIZE)
        if MASKED:
            k = tl.load(k_at, mask=(start + key < end_key)[:, None] & (d < DIM)[None, :], other=0.0)  # [N, D]
        elif DIM < DIM_PAD:
            k = tl.load(k_at, mask=(d < DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
        # v is masked wherever p is 0 for all rows: unwritten memory may hold NaN, and 0 * NaN is not 0.
        if OVERLAP:
            v_at = tile_of(v_ptr, last_blocks, start - TILE_KV, v_block, v_slot, DIM_V_PAD, TILE_KV, BLOCK_SIZE)
            if LOW:
                v = tl.load(v_at, mask=(start - TILE_KV + key >= low_key)[:, None] & (dv < DIM_V)[None, :], other=0.0)
            else:
                v = tl.load(v_at, mask=(start > first_key) & (dv < DIM_V)[None, :], other=0.0)
            last_blocks = blocks & 0x7FFFFFFF  # an operation, since Triton does not pipeline values handed on twice
        else:
            v_at = tile_of(v_ptr, blocks, start, v_block, v_slot, DIM_V_PAD, TILE_KV, BLOCK_SIZE)
            if MASKED and LOW:
                seen = (start + key >= low_key) & (start + key < end_key)
                v = tl.load(v_at, mask=seen[:, None] & (dv < DIM_V)[None, :], other=0.0)  # [N, DV]
            elif MASKED:
                v = tl.load(v_at, mask=(start + key < end_key)[:, None] & (dv < DIM_V)[None, :], other=0.0)
            elif DIM_V < DIM_V_PAD:
                v = tl.load(v_at, mask=(dv < DIM_V)[None, :], other=0.0)
            else:
                v = tl.load(v_at)
        blocks = load_blocks(table_ptr, start + TILE_KV, end_key, TILE_KV, BLOCK_SIZE)
        if INTERPRET:  # the interpreter keeps bf16 as integers: arithmetic on it is silently wrong
            k, v = k.to(tl.float32), v.to(tl.float32)
        else:
            k, v = k.to(q.dtype), v.to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
        if OVERLAP:
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        if not FOLD:
            s *= score_scale
        if SOFT_CAP:
            s = soft_cap * tanh(s / soft_cap)
        if ALIBI:
            s += slope[:, None] * (start + key[None, :] - position[:, None]).to(tl.float32)
        if MASKED:
            s = tl.where((start + key[None, :] >= low[:, None]) & (start + key[None, :] < end[:, None]), s, float("-inf"))
        top = tl.maximum(maximum, tl.max(s, 1))
        safe = top * to_base_2
        if MASKED:
            safe = tl.where(top == float("-inf"), 0.0, safe)  # a row that sees nothing yet must not make inf - inf
        p = tl.exp2(s * to_base_2 - safe[:, None])
        shrink = tl.exp2(maximum * to_base_2 - safe)
        total = total * shrink + tl.sum(p, 1)
        maximum = top
        if not OVERLAP:
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return maximum, total, acc, p, shrink, blocks, last_blocks


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "table_row"])  # one compile for all batch sizes
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, starts_ptr, out_ptr, lse_ptr, slopes_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    scale, soft_cap, num_reqs, num_tokens, num_kv_heads,
    q_token, q_head, k_block: tl.constexpr, k_slot: tl.constexpr, k_head, v_block: tl.constexpr, v_slot: tl.constexpr, v_head,
    o_token, o_head, l_token, l_head, table_row, ks_head, vs_head,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V: tl.constexpr,
    DIM_V_PAD: tl.constexpr, TILE_M: tl.constexpr, TILE_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr, WINDOW_RIGHT: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, KV_SCALES: tl.constexpr, HAS_LSE: tl.constexpr, OVERLAP: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid: ((num_tokens // TOKENS + num_reqs) * num_kv_heads,). TOKENS: query tokens per tile, TOKENS * GROUP <= TILE_M."""
    FOLD: tl.constexpr = not (SOFT_CAP or ALIBI)  # scales are positive: the largest raw score is the largest score
    LOW: tl.constexpr = WINDOW_LEFT >= 0 or CHUNK > 0
    num_tiles = tl.num_programs(0) // num_kv_heads
    kv_head = tl.program_id(0) % num_kv_heads
    tile = num_tiles - 1 - tl.program_id(0) // num_kv_heads
    row = tl.arange(0, TILE_M)
    head = kv_head * GROUP + row % GROUP
    request = find_request(starts_ptr, tile, num_reqs, TOKENS)
    start = tl.load(starts_ptr + request)
    query_len = tl.load(starts_ptr + request + 1) - start
    first_query = (tile - (start // TOKENS + request)) * TOKENS
    if first_query < query_len:
        seq_len = tl.load(seq_lens_ptr + request)
        query = first_query + row // GROUP
        valid = (query < query_len) & (row < TOKENS * GROUP)
        d = tl.arange(0, DIM_PAD)
        at = q_ptr + ((start + query).to(tl.int64) * q_token + head * q_head)[:, None] + d[None, :]
        q = tl.load(at, mask=valid[:, None] & (d < DIM)[None, :], other=0.0)  # [M, D]; untouched, it stays in shared memory
        if INTERPRET:
            q = q.to(tl.float32)
        position = seq_len - query_len + query
        low, end = visible_range(position, seq_len, WINDOW_LEFT, WINDOW_RIGHT, CHUNK, CAUSAL)
        end = tl.where(valid, end, low)
        sees = end > low
        end_key = tl.max(tl.where(sees, end, 0), 0)
        low_key = tl.minimum(tl.min(tl.where(sees, low, 2147483647), 0), end_key)
        first_key = low_key // TILE_KV * TILE_KV
        # Every valid row sees all of [whole_first, whole_end), multiples of TILE_KV.
        whole_end = tl.min(tl.where(valid, end, 2147483647), 0) // TILE_KV * TILE_KV
        whole_first = first_key
        if LOW:
            whole_first = (tl.max(tl.where(valid, low, 0), 0) + TILE_KV - 1) // TILE_KV * TILE_KV
            whole_first = tl.minimum(whole_first, (end_key + TILE_KV - 1) // TILE_KV * TILE_KV)
        whole_end = tl.maximum(whole_end, whole_first)
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
        table_ptr += request.to(tl.int64) * table_row
        k_ptr += kv_head.to(tl.int64) * k_head
        v_ptr += kv_head.to(tl.int64) * v_head
        maximum = tl.full([TILE_M], float("-inf"), tl.float32)
        total = tl.zeros([TILE_M], tl.float32)
        acc = tl.zeros([TILE_M, DIM_V_PAD], tl.float32)
        p = tl.zeros([TILE_M, TILE_KV], tl.float32)
        shrink = tl.full([TILE_M], 1.0, tl.float32)
        blocks = load_blocks(table_ptr, first_key, end_key, TILE_KV, BLOCK_SIZE)
        last_blocks = blocks
        if LOW:
            maximum, total, acc, p, shrink, blocks, last_blocks = attend_tiles(
                maximum, total, acc, p, shrink, blocks, last_blocks, q, position, low, end, slope, first_key, whole_first,
                first_key, low_key, end_key, table_ptr, k_ptr, v_ptr, k_block, k_slot, v_block, v_slot, score_scale, soft_cap,
                DIM, DIM_PAD, DIM_V, DIM_V_PAD, TILE_KV, BLOCK_SIZE, SOFT_CAP, ALIBI, LOW, FOLD, OVERLAP, True, INTERPRET,
            )  # fmt: skip
        maximum, total, acc, p, shrink, blocks, last_blocks = attend_tiles(
            maximum, total, acc, p, shrink, blocks, last_blocks, q, position, low, end, slope, whole_first, whole_end,
            first_key, low_key, end_key, table_ptr, k_ptr, v_ptr, k_block, k_slot, v_block, v_slot, score_scale, soft_cap,
            DIM, DIM_PAD, DIM_V, DIM_V_PAD, TILE_KV, BLOCK_SIZE, SOFT_CAP, ALIBI, LOW, FOLD, OVERLAP, False, INTERPRET,
        )  # fmt: skip
        maximum, total, acc, p, shrink, blocks, last_blocks = attend_tiles(
            maximum, total, acc, p, shrink, blocks, last_blocks, q, position, low, end, slope, whole_end, end_key,
            first_key, low_key, end_key, table_ptr, k_ptr, v_ptr, k_block, k_slot, v_block, v_slot, score_scale, soft_cap,
            DIM, DIM_PAD, DIM_V, DIM_V_PAD, TILE_KV, BLOCK_SIZE, SOFT_CAP, ALIBI, LOW, FOLD, OVERLAP, True, INTERPRET,
        )  # fmt: skip
        if OVERLAP:  # the last tile's values
            last_start = (end_key - 1) // TILE_KV * TILE_KV
            n = last_start + tl.arange(0, TILE_KV)
            v_at = tile_of(v_ptr, last_blocks, last_start, v_block, v_slot, DIM_V_PAD, TILE_KV, BLOCK_SIZE)
            dv = tl.arange(0, DIM_V_PAD)
            v = tl.load(v_at, mask=((n >= low_key) & (n < end_key))[:, None] & (dv < DIM_V)[None, :], other=0.0)
            v = v.to(q.dtype)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        LOG2E: tl.constexpr = 1.4426950408889634
        maximum *= score_scale * LOG2E if FOLD else LOG2E
        out, lse = finish(maximum, total, acc, sink, v_scale, SINKS)
        store_rows(out_ptr, lse_ptr, out, lse, start + query, head, valid, o_token, o_head, l_token, l_head, DIM_V, DIM_V_PAD, HAS_LSE)
    store_padding(
        out_ptr, lse_ptr, starts_ptr, tile, num_tiles, num_reqs, num_tokens, head, row < GROUP, o_token, o_head, l_token, l_head,
        TILE_M, DIM_V, DIM_V_PAD, HAS_LSE,
    )  # fmt: skip
