"""What both attention kernels do with a range of paged keys: their addresses, products, the end of a softmax;
and the decode kernel's mainloop, query rows against such a range.

Legend: M rows of a tile = query tokens x heads of the group; N keys of a tile; D, DV padded widths.

``SPEC`` is the call's `Specialisation`, ``TILING`` a record of paged_attention.py. A field that goes into a
shape is a ``tl.constexpr`` of the function first: Triton takes no plain number there.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchpaged.custom_ops.attention.triton.block_sparse import place
from torchpaged.custom_ops.attention.triton.rows import beside, capped, seen_by, sloped
from torchpaged.custom_ops.triton.interpreter import INTERPRET, as_numbers


class Keys(NamedTuple):
    """Where a request's keys and values of one kv head are: its row of the block table, the pools at
    that head."""

    table: Any
    k: Any
    v: Any


@triton.jit
def slot_offset(slot, stride: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """``slot * stride`` inside a block: in 64 bits where the block's last slot needs them, in 32 where
    it doesn't."""
    if BLOCK_SIZE * stride >= 2147483648:
        slot = slot.to(tl.int64)
    return slot * stride


@triton.jit
def operand(q, row_scale, keys, DIM: tl.constexpr):
    """Queries as the products take them, and what scores are multiplied by, a number per row; ``DIM``: that
    of the columns.

    fp8 converts to fp16 in one instruction, to bf16 in several. A power of two per row keeps q inside fp16's
    range (numbers below 2^-14 of a row's largest lose bits, no more).
    """
    FP8: tl.constexpr = keys.k.dtype.element_ty.primitive_bitwidth == 8
    if INTERPRET:
        q = as_numbers(q)
    elif FP8 and q.dtype == tl.bfloat16:
        largest = tl.max(tl.abs(q.to(tl.float32)), DIM)
        # Of an infinite q finite, so that it stays infinite.
        fold = tl.exp2(tl.ceil(tl.log2(tl.minimum(tl.maximum(largest, 1e-30), 1e37))))
        q = (q.to(tl.float32) / tl.expand_dims(fold, DIM)).to(tl.float16)
        row_scale *= fold
    return q, row_scale


@triton.jit
def converted(x, dtype: tl.constexpr):
    """Keys or values of the pool in the queries' dtype, which is none of 16 bits in the interpreter."""
    return x.to(tl.float32 if INTERPRET else dtype)


@triton.jit
def attend(
    q,
    rows,
    slope,
    first_key,
    end_key,
    path,
    keys,
    score_scale,
    soft_cap,
    SPEC: tl.constexpr,
    TILING: tl.constexpr,
):
    """Returns ``(maximum [M], total [M], acc [M, DV])``, scores in base 2.

    ``first_key``, ``end_key``: ordinals (`place`). Keys at or past ``path.end_key`` are never read.
    ``score_scale`` holds the softmax scale and the cache's k_scale. Block ids are read two tiles ahead, so
    that the loads of keys and values are the only ones behind the software pipeline: a load whose address is
    itself pipelined would halve its depth.
    """
    TILE_M: tl.constexpr = TILING.tile_m
    TILE_KV: tl.constexpr = TILING.tile_kv
    DIM_V_PAD: tl.constexpr = TILING.dim_v_pad
    LOG2E: tl.constexpr = 1.4426950408889634
    LOW: tl.constexpr = SPEC.window_left >= 0 or SPEC.chunk_size > 0  # else low is 0 for all rows
    q, row_scale = operand(q, tl.zeros([TILE_M], tl.float32) + score_scale, keys, 1)
    # finite, so that a row that sees nothing yet makes no inf - inf
    maximum = tl.full([TILE_M], -1.0e30, tl.float32)
    totals = tl.zeros([TILE_M, TILE_KV], tl.float32)  # summed over keys once, at the end
    acc = tl.zeros([TILE_M, DIM_V_PAD], tl.float32)
    first_seen = first_key
    if LOW:
        first_seen = tl.min(rows.low, 0)
    d = tl.arange(0, TILING.dim_pad)
    dv = tl.arange(0, TILING.dim_v_pad)
    ahead = place(first_key, path, SPEC, TILING) + tl.arange(0, TILE_KV)
    block = tl.load(keys.table + ahead // SPEC.block_size, mask=ahead < path.end_key, other=0)
    column = beside(rows, 1)
    for start in range(first_key, end_key, TILE_KV):
        n = place(start, path, SPEC, TILING) + tl.arange(0, TILE_KV)
        inside = n < path.end_key
        ahead = place(start + TILE_KV, path, SPEC, TILING) + tl.arange(0, TILE_KV)
        next_block = tl.load(keys.table + ahead // SPEC.block_size, mask=ahead < path.end_key, other=0)
        offset = (n % SPEC.block_size).to(tl.int64)
        k_at = keys.k + (block.to(tl.int64) * SPEC.k_strides[0] + offset * SPEC.k_strides[1])[None, :]
        k_mask = (d < SPEC.dim)[:, None] & inside[None, :]
        k = converted(tl.load(k_at + d[:, None], mask=k_mask, other=0.0), q.dtype)  # [D, N]
        s = tl.dot(q, k, input_precision="ieee") * row_scale[:, None]  # [M, N]
        s = capped(s, soft_cap, SPEC)
        s = sloped(s, n[None, :], slope[:, None], column, SPEC.tree, SPEC)
        visible = seen_by(n[None, :], column, LOW, SPEC)
        s = tl.where(visible, s * LOG2E, float("-inf"))
        top = tl.maximum(maximum, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        shrink = tl.exp2(maximum - top)
        totals = totals * shrink[:, None] + p
        v_at = keys.v + (block.to(tl.int64) * SPEC.v_strides[0] + offset * SPEC.v_strides[1])[:, None]
        seen = inside
        if LOW:  # blocks in front of a window may be gone and hold anything
            seen = inside & (n >= first_seen)
        if TILING.holes:
            seen = seen & (tl.max(visible.to(tl.int32), 0) > 0)
        v_mask = seen[:, None] & (dv < SPEC.dim_v)[None, :]
        v = converted(tl.load(v_at + dv[None, :], mask=v_mask, other=0.0), q.dtype)  # [N, DV]
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        maximum = top
        block = next_block
    return maximum, tl.sum(totals, 1), acc


@triton.jit
def keys_of(inputs, batch, request, kv_head, k_head, v_head):
    """The `Keys` of a request and kv head; ``k_head``, ``v_head``: strides."""
    return Keys(
        batch.table + request.to(tl.int64) * batch.table_row,
        inputs.k + kv_head.to(tl.int64) * k_head,
        inputs.v + kv_head.to(tl.int64) * v_head,
    )


@triton.jit
def load_slopes(inputs, head, valid, SPEC: tl.constexpr):
    """ALiBi's slopes of ``head [M]``; zeros where there are none."""
    slope = tl.zeros([head.shape[0]], tl.float32)
    if SPEC.alibi:
        slope = tl.load(inputs.slopes + head, mask=valid, other=0.0)
    return slope


@triton.jit
def load_sinks(inputs, head, valid, SPEC: tl.constexpr):
    """Sinks of ``head [M]``; zeros where there are none."""
    sink = tl.zeros([head.shape[0]], tl.float32)
    if SPEC.sinks:
        sink = tl.load(inputs.sinks + head, mask=valid, other=0.0).to(tl.float32)
    return sink


@triton.jit
def finish(maximum, total, acc, sink, v_scale, sees, SINKS: tl.constexpr):
    """``(out [M, DV], lse [M])`` from a finished state; the sink joins the denominator; rows without keys
    (not ``sees [M]``): 0 and -inf.

    ``total`` does not tell which rows see keys: it is NaN where a score was NaN or +inf, and 0 where all were
    -inf, which makes 0 / 0.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    if SINKS:
        top = tl.maximum(maximum, sink * LOG2E)
        shrink = tl.exp2(maximum - top)
        total = total * shrink + tl.exp2(sink * LOG2E - top)
        acc = acc * shrink[:, None]
        maximum = top
    divisor = tl.where(sees, total, 1.0)
    out = tl.where(sees[:, None], acc * (v_scale / divisor)[:, None], 0.0)
    lse = tl.where(sees, maximum * LN2 + tl.log(divisor), float("-inf"))
    return out, lse
