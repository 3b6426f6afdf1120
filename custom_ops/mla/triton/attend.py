"""Attention over latents: one program takes a tile of rows (query tokens x heads) of one request, and a part
of its context.

All heads share a token's row, so that a tile of rows reads it once: its first RANK numbers are loaded as one
tile that serves the scores, transposed, and the values as it is; the rotated key follows it in memory. With
one part per request a program writes the result; with several it leaves its part in scratch memory, and
`merge_kernel` puts them together. Nothing reads a length on the host: a program finds its request and its
range from the batch's own tensors. Sources: split-KV (arXiv:2501.01005, section 2.2), absorbed latents
(arXiv:2405.04434, appendix C).

Legend: M rows of a tile, N keys of a tile, C columns of a latent, E of a rotated key. ``SIZES``: `Sizes`.
"""

import triton
import triton.language as tl

from torchpaged.custom_ops.mla.triton.fp8_rows import fp8_tile
from torchpaged.custom_ops.triton.find_row import find_row
from torchpaged.custom_ops.triton.interpreter import as_numbers
from torchpaged.custom_ops.triton.results import store_rows


@triton.jit
def request_of(tile, starts_ptr, num_reqs, tiles_per_req, TOKENS: tl.constexpr):
    """``(request, tile in it)``: every request has ``tiles_per_req`` tiles; if that is 0, request ``r``
    begins at tile ``r + starts[r] // TOKENS``. Some tiles are empty either way."""
    low = tile // tl.maximum(tiles_per_req, 1)
    first = low * tiles_per_req
    if tiles_per_req == 0:
        low = find_row(tile, starts_ptr, num_reqs, TOKENS)
        first = tl.load(starts_ptr + low) // TOKENS + low
    return low, tile - first


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "num_tiles", "tiles_per_req", "num_parts", "table_row"]
)
def mla_kernel(
    num_reqs,
    num_tokens,
    num_tiles,
    tiles_per_req,
    num_parts,
    table_row,
    batch,
    inputs,
    results,
    parts,
    SIZES: tl.constexpr,
):
    """Arguments: `AttendArguments`. Grid: (tiles of query tokens x parts x tiles of heads,), the last of
    which share their keys."""
    RANK: tl.constexpr = SIZES.rank
    TILE_M: tl.constexpr = SIZES.tile_m
    TILE_HEADS: tl.constexpr = SIZES.tile_heads
    TOKENS: tl.constexpr = TILE_M // TILE_HEADS
    HEAD_TILES: tl.constexpr = (SIZES.num_heads + TILE_HEADS - 1) // TILE_HEADS
    program = tl.program_id(0)
    row = tl.arange(0, TILE_M)
    head = program % HEAD_TILES * TILE_HEADS + row % TILE_HEADS
    part = program // HEAD_TILES % num_parts
    program = program // HEAD_TILES // num_parts
    d = tl.arange(0, SIZES.rank_pad)
    request, tile = request_of(program, batch.starts, num_reqs, tiles_per_req, TOKENS)
    start = tl.load(batch.starts + request)
    query_len = tl.load(batch.starts + request + 1) - start
    seq_len = tl.load(batch.seq_lens + request)
    query = tile * TOKENS + row // TILE_HEADS
    if tile * TOKENS < query_len:
        valid = (query < query_len) & (head < SIZES.num_heads)
        position = seq_len - query_len + query
        end = tl.where(valid & (position >= 0), seq_len, 0)  # keys that each row sees
        last = seq_len
        if SIZES.causal:
            end = tl.minimum(end, tl.maximum(position + 1, 0))
            last = seq_len - query_len + tl.minimum(tile * TOKENS + TOKENS, query_len)
        last = tl.maximum(last, 0)
        first = 0
        if SIZES.split:
            TILE_KV: tl.constexpr = SIZES.tile_kv
            each = ((last + TILE_KV - 1) // TILE_KV + num_parts - 1) // num_parts * TILE_KV
            first = part * each
            last = tl.minimum(first + each, last)
        token = (start + query).to(tl.int64)
        q_at = inputs.q + (token * inputs.q_token + head.to(tl.int64) * inputs.q_head)[:, None]
        e = tl.arange(0, SIZES.rope_pad)
        q = tl.load(q_at + d[None, :], mask=valid[:, None] & (d < RANK)[None, :], other=0.0)  # [M, C]
        q_pe = tl.load(q_at + RANK + e[None, :], mask=valid[:, None] & (e < SIZES.rope)[None, :], other=0.0)
        table = batch.table + request.to(tl.int64) * table_row
        state = attend(as_numbers(q), as_numbers(q_pe), end, first, last, table, inputs, SIZES)
        if SIZES.split:
            store_part(parts, state, end > first, token, head, part, num_parts, valid, SIZES)
        else:
            store_whole(results, state, end > 0, token, head, valid, SIZES)
    if not SIZES.split:  # else the merge writes all rows
        RANK_PAD: tl.constexpr = SIZES.rank_pad
        used = tl.load(batch.starts + num_reqs)
        for behind in range(used + program, num_tokens, num_tiles):
            store_rows(
                results,
                tl.zeros([TILE_M, RANK_PAD], tl.float32),
                tl.full([TILE_M], float("-inf"), tl.float32),
                tl.zeros([TILE_M], tl.int32) + behind,
                head,
                (row < TILE_HEADS) & (head < SIZES.num_heads),
                RANK,
                RANK_PAD,
            )


@triton.jit
def store_whole(results, state, sees, token, head, valid, SIZES: tl.constexpr):
    """Rows that have attended to their whole context; ``sees [M]``: to some key of it."""
    LOG2E: tl.constexpr = 1.4426950408889634
    maximum, total, acc = state
    divisor = tl.where(sees, total, 1.0)
    out = tl.where(sees[:, None], acc * (1.0 / divisor)[:, None], 0.0)
    lse = tl.where(sees, (maximum + tl.log2(divisor)) / LOG2E, float("-inf"))
    store_rows(results, out, lse, token, head, valid, SIZES.rank, SIZES.rank_pad)


@triton.jit
def store_part(parts, state, sees, token, head, part, num_parts, valid, SIZES: tl.constexpr):
    """One part of rows, for the merge; ``sees [M]``: it holds keys of the row."""
    maximum, total, acc = state
    d = tl.arange(0, SIZES.rank_pad)
    at = (token * SIZES.num_heads + head) * num_parts + part
    # below every maximum that keys leave: this part holds none for the row
    tl.store(parts.state + at * 2, tl.where(sees, maximum, -2.0e30), mask=valid)
    tl.store(parts.state + at * 2 + 1, total, mask=valid)
    tl.store(
        parts.acc + at[:, None] * SIZES.rank + d[None, :],
        acc,
        mask=(valid & sees)[:, None] & (d < SIZES.rank)[None, :],
    )


@triton.jit
def attend(q, q_pe, end, first, last, table_ptr, inputs, SIZES: tl.constexpr):
    """Rows ``q [M, C]``, ``q_pe [M, E]`` against keys ``[first, last)``; row i sees those below ``end[i]``.

    Returns ``(maximum [M], total [M], acc [M, C])``, scores in base 2. Keys at or past ``last`` are never
    read: a tile that it cuts reads the last key again, whose score is masked there. Block ids are read a tile
    ahead of their rows.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    RANK: tl.constexpr = SIZES.rank
    RANK_PAD: tl.constexpr = SIZES.rank_pad
    TILE_M: tl.constexpr = SIZES.tile_m
    TILE_KV: tl.constexpr = SIZES.tile_kv
    BLOCK_SIZE: tl.constexpr = SIZES.block_size
    score_scale = inputs.scale * LOG2E
    d, e = tl.arange(0, RANK_PAD), tl.arange(0, SIZES.rope_pad)
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
        kv_at = inputs.kv + block.to(tl.int64) * inputs.kv_block + slot.to(tl.int64) * inputs.kv_slot
        if SIZES.fp8:
            kv, k_pe = fp8_tile(kv_at, None, q.dtype, SIZES)
        elif RANK == RANK_PAD:
            kv = tl.load(kv_at[:, None] + d[None, :])  # [N, C]
        else:
            kv = tl.load(kv_at[:, None] + d[None, :], mask=(d < RANK)[None, :], other=0.0)
        if SIZES.fp8:
            pass  # read above
        elif SIZES.rope == SIZES.rope_pad:
            k_pe = tl.load(kv_at[None, :] + RANK + e[:, None])  # [E, N]
        else:
            k_pe = tl.load(kv_at[None, :] + RANK + e[:, None], mask=(e < SIZES.rope)[:, None], other=0.0)
        seen = n[None, :] < end[:, None]
        state = maximum, total, acc
        maximum, total, acc = add_keys(q, q_pe, as_numbers(kv), as_numbers(k_pe), seen, score_scale, state)
        block = next_block
    return maximum, total, acc


@triton.jit
def add_keys(q, q_pe, kv, k_pe, seen, score_scale, state):
    """``(maximum, total, acc)`` of rows with a tile of keys ``kv [N, C]``, ``k_pe [E, N]`` taken in, those
    that are ``seen``."""
    maximum, total, acc = state
    s = tl.dot(q, tl.trans(kv), input_precision="ieee")  # [M, N]
    if q.dtype == tl.float32:
        # FMAs round one long sum at every product: the rotated key's begins anew, and so do a tile's
        # values below; `fma`, since the compiler turns a sum with a dot into one
        s = tl.fma(tl.dot(q_pe, k_pe, input_precision="ieee"), score_scale, s * score_scale)
    else:
        s = tl.dot(q_pe, k_pe, acc=s, input_precision="ieee") * score_scale
    s = tl.where(seen, s, float("-inf"))
    top = tl.maximum(maximum, tl.max(s, 1))
    p = tl.exp2(s - top[:, None])
    shrink = tl.exp2(maximum - top)
    total = total * shrink + tl.sum(p, 1)
    weighted = tl.dot(p.to(kv.dtype), kv, input_precision="ieee")
    if q.dtype == tl.float32:
        acc = tl.fma(acc, shrink[:, None], weighted)
    else:
        acc = acc * shrink[:, None] + weighted
    return top, total, acc
