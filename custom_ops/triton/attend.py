"""The loop both attention kernels share: query rows against a range of paged keys, softmax online.

Legend: M rows of a tile = query tokens x heads of the group; N keys of a tile; D, DV padded widths.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh in float32: a series near 0, where the formula with exp cancels."""
    x2 = x * x
    series = x * (1.0 + x2 * (-0.33333333333 + x2 * (0.13333333333 + x2 * (-0.05396825397 + x2 * 0.02186948854))))
    far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return tl.where(tl.abs(x) < 0.3, series, far)


@triton.jit
def visible_range(position, seq_len, WINDOW_LEFT: tl.constexpr, WINDOW_RIGHT: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr):
    """The keys ``[low, end)`` that a query at ``position`` sees: every mask of the op is an interval. Empty below position 0."""
    low = tl.zeros_like(position)
    end = tl.zeros_like(position) + seq_len
    if CAUSAL:
        end = tl.minimum(end, position + 1)
    if WINDOW_LEFT >= 0:
        low = tl.maximum(low, position - WINDOW_LEFT)
    if WINDOW_RIGHT >= 0:
        end = tl.minimum(end, position + WINDOW_RIGHT + 1)
    if CHUNK > 0:
        chunk = position // CHUNK * CHUNK
        low = tl.maximum(low, chunk)
        end = tl.minimum(end, chunk + CHUNK)
    end = tl.where(position < 0, 0, end)
    return low, tl.maximum(end, low)


@triton.jit
def attend(
    q, position, low, end, slope, first_key, end_key, table_ptr, k_ptr, v_ptr, k_block, k_slot, v_block, v_slot,
    score_scale, soft_cap,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V: tl.constexpr, DIM_V_PAD: tl.constexpr, TILE_M: tl.constexpr,
    TILE_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Returns ``(maximum [M], total [M], acc [M, DV])``, scores in base 2.

    ``k_ptr`` and ``v_ptr`` point at the kv head; keys at or past ``end_key`` are never read. ``score_scale`` holds the softmax
    scale and the cache's k_scale.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    maximum = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, DIM_V_PAD], tl.float32)
    d = tl.arange(0, DIM_PAD)
    dv = tl.arange(0, DIM_V_PAD)
    for start in range(first_key, end_key, TILE_KV):
        n = start + tl.arange(0, TILE_KV)
        inside = n < end_key
        block = tl.load(table_ptr + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = (n % BLOCK_SIZE).to(tl.int64)
        k_at = k_ptr + (block * k_block + offset * k_slot)[None, :] + d[:, None]
        k = tl.load(k_at, mask=(d < DIM)[:, None] & inside[None, :], other=0.0)  # [D, N]
        if INTERPRET:  # the interpreter keeps bf16 as integers: arithmetic on it is silently wrong
            k = k.to(tl.float32)
        else:
            k = k.to(q.dtype)
        s = tl.dot(q, k, input_precision="ieee") * score_scale  # [M, N]
        if SOFT_CAP:
            s = soft_cap * tanh(s / soft_cap)
        if ALIBI:
            s += slope[:, None] * (n[None, :] - position[:, None]).to(tl.float32)
        s = tl.where((n[None, :] >= low[:, None]) & (n[None, :] < end[:, None]), s * LOG2E, float("-inf"))
        top = tl.maximum(maximum, tl.max(s, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)  # a row that sees nothing yet must not make inf - inf
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(maximum - safe)
        total = total * shrink + tl.sum(p, 1)
        v_at = v_ptr + (block * v_block + offset * v_slot)[:, None] + dv[None, :]
        v = tl.load(v_at, mask=inside[:, None] & (dv < DIM_V)[None, :], other=0.0)  # [N, DV]
        if INTERPRET:
            v = v.to(tl.float32)
        else:
            v = v.to(q.dtype)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        maximum = top
    return maximum, total, acc


@triton.jit
def finish(maximum, total, acc, sink, v_scale, SINKS: tl.constexpr):
    """``(out [M, DV], lse [M])`` from a finished state; the sink joins the denominator; rows without keys: 0 and -inf."""
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    sees = total > 0
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
