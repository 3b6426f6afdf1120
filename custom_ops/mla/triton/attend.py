"""Attention over latents: one program takes a tile of rows (query tokens x heads) of one request, and a part
of its context.

All heads share a token's row, so that a tile of rows reads it once: its first RANK numbers are loaded as one
tile that serves the scores, transposed, and the values as it is; the rotated key follows it in memory. With
one part per request a program writes the result; with several it leaves its part in scratch memory, and
`merge_kernel` puts them together. Nothing reads a length on the host: a program finds its request and its
range from the batch's own tensors. Sources: split-KV (arXiv:2501.01005, section 2.2), absorbed latents
(arXiv:2405.04434, appendix C).

Legend: M rows of a tile, N keys of a tile, C columns of a latent, E of a rotated key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchpaged.custom_ops.triton.results import Results, store_rows


@triton.jit
def request_of(
    tile,
    starts_ptr,
    num_reqs,
    tiles_per_req,
    TOKENS: tl.constexpr,
):
    """``(request, tile in it)``: every request has ``tiles_per_req`` tiles; if that is 0, request ``r``
    begins at tile ``r + starts[r] // TOKENS``. Some tiles are empty either way."""
    low = tile // tl.maximum(tiles_per_req, 1)
    first = low * tiles_per_req
    if tiles_per_req == 0:
        low = tl.zeros_like(tile)
        high = low + num_reqs
        while high - low > 1:  # the last request that begins at or before the tile
            middle = (low + high) // 2
            begins = tl.load(starts_ptr + middle) // TOKENS + middle <= tile
            low = tl.where(begins, middle, low)
            high = tl.where(begins, high, middle)
        first = tl.load(starts_ptr + low) // TOKENS + low
    return low, tile - first


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "num_tiles", "tiles_per_req", "parts", "table_row"])
def mla_kernel(
    q_ptr,
    kv_ptr,
    table_ptr,
    seq_lens_ptr,
    starts_ptr,
    out_ptr,
    lse_ptr,
    part_acc_ptr,
    part_state_ptr,
    scale,
    num_reqs,
    num_tokens,
    num_tiles,
    tiles_per_req,
    parts,
    q_token,
    q_head,
    kv_block,
    kv_slot,
    o_token,
    o_head,
    l_token,
    l_head,
    table_row,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_KV: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid: (tiles of query tokens x parts x tiles of heads,), the last of which share their keys. SPLIT:
    ``parts`` is over 1."""
    LOG2E: tl.constexpr = 1.4426950408889634
    TOKENS: tl.constexpr = TILE_M // TILE_HEADS
    results = Results(out_ptr, lse_ptr, o_token, o_head, l_token, l_head)
    HEAD_TILES: tl.constexpr = (NUM_HEADS + TILE_HEADS - 1) // TILE_HEADS
    program = tl.program_id(0)
    row = tl.arange(0, TILE_M)
    head = program % HEAD_TILES * TILE_HEADS + row % TILE_HEADS
    part = program // HEAD_TILES % parts
    program = program // HEAD_TILES // parts
    d = tl.arange(0, RANK_PAD)
    request, tile = request_of(program, starts_ptr, num_reqs, tiles_per_req, TOKENS)
    start = tl.load(starts_ptr + request)
    query_len = tl.load(starts_ptr + request + 1) - start
    seq_len = tl.load(seq_lens_ptr + request)
    query = tile * TOKENS + row // TILE_HEADS
    if tile * TOKENS < query_len:
        valid = (query < query_len) & (head < NUM_HEADS)
        position = seq_len - query_len + query
        end = tl.where(valid & (position >= 0), seq_len, 0)  # keys that each row sees
        last = seq_len
        if CAUSAL:
            end = tl.minimum(end, tl.maximum(position + 1, 0))
            last = seq_len - query_len + tl.minimum(tile * TOKENS + TOKENS, query_len)
        last = tl.maximum(last, 0)
        first = 0
        if SPLIT:
            each = ((last + TILE_KV - 1) // TILE_KV + parts - 1) // parts * TILE_KV
            first = part * each
            last = tl.minimum(first + each, last)
        token = (start + query).to(tl.int64)
        q_at = q_ptr + (token * q_token + head.to(tl.int64) * q_head)[:, None]
        e = tl.arange(0, ROPE_PAD)
        q = tl.load(q_at + d[None, :], mask=valid[:, None] & (d < RANK)[None, :], other=0.0)  # [M, C]
        q_pe = tl.load(q_at + RANK + e[None, :], mask=valid[:, None] & (e < ROPE)[None, :], other=0.0)
        table_at = table_ptr + request.to(tl.int64) * table_row
        maximum, total, acc = attend(
            q=q,
            q_pe=q_pe,
            end=end,
            first=first,
            last=last,
            table_ptr=table_at,
            kv_ptr=kv_ptr,
            kv_block=kv_block,
            kv_slot=kv_slot,
            score_scale=scale * LOG2E,
            RANK=RANK,
            RANK_PAD=RANK_PAD,
            ROPE=ROPE,
            ROPE_PAD=ROPE_PAD,
            BLOCK_SIZE=BLOCK_SIZE,
            TILE_M=TILE_M,
            TILE_KV=TILE_KV,
            INTERPRET=INTERPRET,
        )
        if not SPLIT:
            sees = end > 0
            divisor = tl.where(sees, total, 1.0)
            store_rows(
                results,
                tl.where(sees[:, None], acc * (1.0 / divisor)[:, None], 0.0),
                tl.where(sees, (maximum + tl.log2(divisor)) / LOG2E, float("-inf")),
                token,
                head,
                valid,
                RANK,
                RANK_PAD,
            )
        else:
            sees = end > first
            at = (token * NUM_HEADS + head) * parts + part
            # below every maximum that keys leave: this part holds none for the row
            tl.store(part_state_ptr + at * 2, tl.where(sees, maximum, -2.0e30), mask=valid)
            tl.store(part_state_ptr + at * 2 + 1, total, mask=valid)
            tl.store(
                part_acc_ptr + at[:, None] * RANK + d[None, :],
                acc,
                mask=(valid & sees)[:, None] & (d < RANK)[None, :],
            )
    if not SPLIT:  # else the merge writes all rows
        used = tl.load(starts_ptr + num_reqs)
        for behind in range(used + program, num_tokens, num_tiles):
            store_rows(
                results,
                tl.zeros([TILE_M, RANK_PAD], tl.float32),
                tl.full([TILE_M], float("-inf"), tl.float32),
                tl.zeros([TILE_M], tl.int32) + behind,
                head,
                (row < TILE_HEADS) & (head < NUM_HEADS),
                RANK,
                RANK_PAD,
            )


@triton.jit
def attend(
    q,
    q_pe,
    end,
    first,
    last,
    table_ptr,
    kv_ptr,
    kv_block,
    kv_slot,
    score_scale,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_KV: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Rows ``q [M, C]``, ``q_pe [M, E]`` against keys ``[first, last)``; row i sees those below ``end[i]``.

    Returns ``(maximum [M], total [M], acc [M, C])``, scores in base 2. Keys at or past ``last`` are never
    read: a tile that it cuts reads the last key again, whose score is masked there. Block ids are read a tile
    ahead of their rows.
    """
    if INTERPRET:  # the interpreter keeps bf16 as integers: arithmetic on it is silently wrong
        q, q_pe = q.to(tl.float32), q_pe.to(tl.float32)
    d, e = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    # finite, so that a row that sees nothing yet makes no inf - inf
    maximum = tl.full([TILE_M], -1.0e30, tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, RANK_PAD], tl.float32)
    ahead = tl.minimum(first + tl.arange(0, TILE_KV), last - 1)
    block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead >= first, other=0)
    for start in range(first, last, TILE_KV):
        n = start + tl.arange(0, TILE_KV)
        slot = tl.minimum(n, last - 1) % BLOCK_SIZE
        next_block = tl.load(table_ptr + tl.minimum(n + TILE_KV, last - 1) // BLOCK_SIZE)
        kv_at = kv_ptr + block.to(tl.int64) * kv_block + slot.to(tl.int64) * kv_slot
        if RANK == RANK_PAD:
            kv = tl.load(kv_at[:, None] + d[None, :])  # [N, C]
        else:
            kv = tl.load(kv_at[:, None] + d[None, :], mask=(d < RANK)[None, :], other=0.0)
        if ROPE == ROPE_PAD:
            k_pe = tl.load(kv_at[None, :] + RANK + e[:, None])  # [E, N]
        else:
            k_pe = tl.load(kv_at[None, :] + RANK + e[:, None], mask=(e < ROPE)[:, None], other=0.0)
        if INTERPRET:
            kv, k_pe = kv.to(tl.float32), k_pe.to(tl.float32)
        s = tl.dot(q, tl.trans(kv), input_precision="ieee")  # [M, N]
        if q.dtype == tl.float32:
            # FMAs round one long sum at every product: the rotated key's begins anew, and so do a tile's
            # values below; `fma`, since the compiler turns a sum with a dot into one
            s = tl.fma(tl.dot(q_pe, k_pe, input_precision="ieee"), score_scale, s * score_scale)
        else:
            s = tl.dot(q_pe, k_pe, acc=s, input_precision="ieee") * score_scale
        s = tl.where(n[None, :] < end[:, None], s, float("-inf"))
        top = tl.maximum(maximum, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        shrink = tl.exp2(maximum - top)
        total = total * shrink + tl.sum(p, 1)
        weighted = tl.dot(p.to(kv.dtype), kv, input_precision="ieee")
        if q.dtype == tl.float32:
            acc = tl.fma(acc, shrink[:, None], weighted)
        else:
            acc = acc * shrink[:, None] + weighted
        maximum = top
        block = next_block
    return maximum, total, acc
