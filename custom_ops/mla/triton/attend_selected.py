"""Sparse attention over latents: one program takes heads of one query token, and a part of the positions that
it selects.

The rows of a tile are heads of one token, since each token has keys of its own. A tile of keys is gathered:
positions, then their blocks out of the table, then the rows. Parts, merge and what is read of the batch: as
in attend.py, whose legend holds here.
"""

import triton
import triton.language as tl

from torchpaged.custom_ops.mla.triton.attend import add_keys, store_part, store_whole
from torchpaged.custom_ops.mla.triton.fp8_rows import fp8_tile
from torchpaged.custom_ops.triton.find_row import find_row
from torchpaged.custom_ops.triton.interpreter import as_numbers


@triton.jit(do_not_specialize=["num_reqs", "num_parts", "table_row", "top_k", "indices_row"])
def selected_kernel(
    num_reqs,
    num_parts,
    table_row,
    top_k,
    indices_row,
    batch,
    inputs,
    indices_ptr,
    results,
    parts,
    SIZES: tl.constexpr,
):
    """Arguments: `SelectedArguments`. Grid: (num_tokens x parts x tiles of heads,), the last of which share
    their keys."""
    RANK: tl.constexpr = SIZES.rank
    TILE_M: tl.constexpr = SIZES.tile_m
    TILE_KV: tl.constexpr = SIZES.tile_kv
    HEAD_TILES: tl.constexpr = (SIZES.num_heads + TILE_M - 1) // TILE_M
    program = tl.program_id(0)
    head = program % HEAD_TILES * TILE_M + tl.arange(0, TILE_M)
    part = program // HEAD_TILES % num_parts
    token = program // HEAD_TILES // num_parts
    valid = head < SIZES.num_heads
    request = find_row(token, batch.starts, num_reqs)
    position = tl.load(batch.seq_lens + request) - tl.load(batch.starts + request + 1) + token
    end = tl.load(batch.seq_lens + request)  # of what the token sees; 0: nothing
    if SIZES.causal:
        end = tl.minimum(end, position + 1)
    end = tl.where((position >= 0) & (token < tl.load(batch.starts + num_reqs)), end, 0)
    first, last = 0, tl.where(end > 0, top_k, 0)
    if SIZES.split:
        each = ((top_k + TILE_KV - 1) // TILE_KV + num_parts - 1) // num_parts * TILE_KV
        first = part * each
        last = tl.minimum(first + each, last)
    d, e = tl.arange(0, SIZES.rank_pad), tl.arange(0, SIZES.rope_pad)
    rows = tl.zeros([TILE_M], tl.int64) + token
    q_at = inputs.q + (rows * inputs.q_token + head.to(tl.int64) * inputs.q_head)[:, None]
    q = tl.load(q_at + d[None, :], mask=valid[:, None] & (d < RANK)[None, :], other=0.0)
    q_pe = tl.load(q_at + RANK + e[None, :], mask=valid[:, None] & (e < SIZES.rope)[None, :], other=0.0)
    table = batch.table + request.to(tl.int64) * table_row
    indices = indices_ptr + token.to(tl.int64) * indices_row
    state, count = attend_selected(
        as_numbers(q), as_numbers(q_pe), end, first, last, table, indices, inputs, SIZES
    )
    sees = (tl.zeros([TILE_M], tl.int32) + count) > 0
    if SIZES.split:
        store_part(parts, state, sees, rows, head, part, num_parts, valid, SIZES)
    else:
        store_whole(results, state, sees, rows, head, valid, SIZES)


@triton.jit
def attend_selected(q, q_pe, end, first, last, table_ptr, indices_ptr, inputs, SIZES: tl.constexpr):
    """Rows ``q [M, C]``, ``q_pe [M, E]`` against the selected keys ``[first, last)``, of which those at
    positions in ``[0, end)`` are seen: no other is read.

    Returns ``(maximum [M], total [M], acc [M, C])``, scores in base 2, and how many keys are seen.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    RANK_PAD: tl.constexpr = SIZES.rank_pad
    TILE_M: tl.constexpr = SIZES.tile_m
    TILE_KV: tl.constexpr = SIZES.tile_kv
    d, e = tl.arange(0, RANK_PAD), tl.arange(0, SIZES.rope_pad)
    maximum = tl.full([TILE_M], -1.0e30, tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, RANK_PAD], tl.float32)
    counts = tl.zeros([TILE_KV], tl.int32)
    for start in range(first, last, TILE_KV):
        at = start + tl.arange(0, TILE_KV)
        n = tl.load(indices_ptr + at, mask=at < last, other=-1)
        seen = (n >= 0) & (n < end)
        counts += seen.to(tl.int32)
        block = tl.load(table_ptr + n // SIZES.block_size, mask=seen, other=0)
        slot = tl.where(seen, n % SIZES.block_size, 0)
        kv_at = inputs.kv + block.to(tl.int64) * inputs.kv_block + slot.to(tl.int64) * inputs.kv_slot
        if SIZES.fp8:
            kv, k_pe = fp8_tile(kv_at, seen, q.dtype, SIZES)
        else:
            kv_mask = seen[:, None] & (d < SIZES.rank)[None, :]
            kv = tl.load(kv_at[:, None] + d[None, :], mask=kv_mask, other=0.0)
            k_pe_mask = seen[None, :] & (e < SIZES.rope)[:, None]
            k_pe = tl.load(kv_at[None, :] + SIZES.rank + e[:, None], mask=k_pe_mask, other=0.0)
        maximum, total, acc = add_keys(
            q,
            q_pe,
            as_numbers(kv),
            as_numbers(k_pe),
            seen[None, :],
            inputs.scale * LOG2E,
            (maximum, total, acc),
        )
    return (maximum, total, acc), tl.sum(counts, 0)
