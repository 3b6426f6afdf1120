"""Rows as a library's kernel of gated delta nets wants them: tokens without gaps between them, normalised,
gates by themselves, and states of few rows side by side."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.state.call import NORM_EPS, LinearAttentionCall
from torchpaged.custom_ops.state.triton.causal_conv import row_of
from torchpaged.custom_ops.state.triton.records import Batch, State
from torchpaged.custom_ops.triton.find_row import find_row_of_tile
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import next_power_of_2
from torchpaged.custom_ops.triton.records import Matrix, Tokens

_TILE = 32  # tokens of a program; columns of a state


class LibraryRows(NamedTuple):
    """Attributes:
    q, k: ``[T, num_key_heads, key_dim]``, ``v [T, num_heads, value_dim]``: contiguous, normalised if the call
        asks for it, zeros in tokens that leave no trace: padding, and rows without a slot.
    decay, beta: ``[T, num_heads]`` float32, 1 and 0 in such tokens: with a state of zeros they give zeros.
    reads, writes: ``[B]`` int32, slots; -1 where a row begins from zeros, or writes none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    reads: Tensor
    writes: Tensor


@triton.jit
def copy_tokens(
    x,
    to_ptr,
    token,
    live,
    inside,
    head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
):
    """One head of a tile's tokens; zeros of those that are not live."""
    d = tl.arange(0, PAD)
    here = live[:, None] & (d < DIM)[None, :]
    rows = tl.load(x.ptr + token[:, None] * x.token + head * x.head + d[None, :], mask=here, other=0.0)
    if NORMALIZE:
        wide = rows.to(tl.float32)
        rows = wide * tl.rsqrt(tl.sum(wide * wide, 1) + EPS)[:, None]
    to = to_ptr + (token[:, None] * HEADS + head) * DIM + d[None, :]
    tl.store(to, rows.to(to_ptr.dtype.element_ty), mask=inside[:, None] & (d < DIM)[None, :])


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def library_rows_kernel(
    num_reqs,
    num_tokens,
    q,
    k,
    v,
    g,
    beta,
    batch,
    out,
    rows,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    TILE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
):
    """Grid: (num_tokens // TILE + num_reqs, 2 * KEY_HEADS + HEADS); ``q, k, v, out``: `Tokens`, ``rows``:
    `LibraryRows`. Also zeros of ``out`` behind the last row."""
    req, part = find_row_of_tile(tl.program_id(0), batch.starts, num_reqs, TILE)
    head = tl.program_id(1)
    begin, count, first, slot, seq_len = row_of(req, batch)
    at = part * TILE + tl.arange(0, TILE)
    token = begin.to(tl.int64) + at
    end = tl.where(req == num_reqs - 1, num_tokens - begin, count)
    inside = at < end
    live = (at >= first) & (at < count) & (slot > 0)
    if head < KEY_HEADS:
        copy_tokens(q, rows.q, token, live, inside, head, KEY_HEADS, KEY_DIM, KEY_PAD, NORMALIZE, EPS)
    elif head < 2 * KEY_HEADS:
        copy_tokens(
            k, rows.k, token, live, inside, head - KEY_HEADS, KEY_HEADS, KEY_DIM, KEY_PAD, NORMALIZE, EPS
        )
    else:
        h = head - 2 * KEY_HEADS
        copy_tokens(v, rows.v, token, live, inside, h, HEADS, VALUE_DIM, VALUE_PAD, False, EPS)
        decay = tl.exp(tl.load(g.ptr + token * g.row + h, mask=live, other=0.0))
        tl.store(rows.decay + token * HEADS + h, decay, mask=inside)
        factor = live.to(tl.float32)
        if beta.ptr is not None:
            factor = tl.load(beta.ptr + token * beta.row + h, mask=live, other=0.0).to(tl.float32)
        tl.store(rows.beta + token * HEADS + h, factor, mask=inside)
        behind = inside & (at >= count)
        if tl.max(behind.to(tl.int32), 0) > 0:
            d = tl.arange(0, VALUE_PAD)
            place = out.ptr + token[:, None] * out.token + h * out.head + d[None, :]
            nothing = tl.zeros((TILE, VALUE_PAD), out.ptr.dtype.element_ty)
            tl.store(place, nothing, mask=behind[:, None] & (d < VALUE_DIM)[None, :])
    if (head == 0) & (part == 0):
        writes = tl.where(slot > 0, slot, -1)
        tl.store(rows.writes + req, writes)
        tl.store(rows.reads + req, tl.where(seq_len > count, writes, -1))


def library_rows(call: LinearAttentionCall) -> LibraryRows:
    """What the library is called with, on the device from end to end."""
    q, k, v, out, num_reqs = call.q, call.k, call.v, call.out, call.state_slots.shape[0]
    num_tokens, num_heads, value_dim = v.shape
    _, key_heads, key_dim = q.shape
    wide: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    slots: dict[str, Any] = {"dtype": torch.int32, "device": v.device}
    own = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, call.g)]
    own.append(torch.empty(num_tokens, num_heads, **wide))
    rows = LibraryRows(*own, *(torch.empty(num_reqs, **slots) for _ in range(2)))
    launch_kernel(
        library_rows_kernel,
        (num_tokens // _TILE + num_reqs, 2 * key_heads + num_heads),
        num_reqs,
        num_tokens,
        *map(Tokens.of, (q, k, v)),
        Matrix.of(call.g),
        Matrix.of(call.beta),
        Batch(call.state_slots, call.seq_lens, call.query_start_loc),
        Tokens.of(out),
        rows,
        KEY_HEADS=key_heads,
        HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_PAD=next_power_of_2(key_dim),
        VALUE_PAD=next_power_of_2(value_dim),
        TILE=_TILE,
        NORMALIZE=call.normalize,
        EPS=NORM_EPS,
        num_warps=4,
    )
    return rows


@triton.jit
def move_states_kernel(
    slots_ptr,
    state,
    packed_ptr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    TILE: tl.constexpr,
    TO_POOL: tl.constexpr,
):
    """Grid: (num_reqs * HEADS * VALUE_DIM / TILE,); ``state``: `State`."""
    TILES: tl.constexpr = VALUE_DIM // TILE
    place = tl.program_id(0) // TILES
    req, head = place // HEADS, place % HEADS
    slot = tl.load(slots_ptr + req).to(tl.int64)
    n, d = tl.arange(0, KEY_PAD), tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    of_key = n < KEY_DIM
    pool = state.ptr + slot * state.slot + head * state.head + n[:, None] * state.row + d[None, :]
    packed = packed_ptr + place.to(tl.int64) * KEY_DIM * VALUE_DIM + d[:, None] * KEY_DIM + n[None, :]
    if TO_POOL:
        if slot >= 0:
            matrix = tl.trans(tl.load(packed, mask=of_key[None, :], other=0.0))
            tl.store(pool, matrix.to(state.ptr.dtype.element_ty), mask=of_key[:, None])
    else:
        matrix = tl.load(pool, mask=of_key[:, None] & (slot >= 0), other=0.0).to(tl.float32)
        tl.store(packed, tl.trans(matrix), mask=of_key[None, :])


def _move(slots: Tensor, state: Tensor, packed: Tensor, to_pool: bool) -> None:
    num_heads, key_dim, value_dim = state.shape[1:]
    launch_kernel(
        move_states_kernel,
        (slots.shape[0] * num_heads * (value_dim // _TILE),),
        slots,
        State.of(state),
        packed,
        HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_PAD=next_power_of_2(key_dim),
        TILE=_TILE,
        TO_POOL=to_pool,
        num_warps=4,
    )


def gather_states(slots: Tensor, state: Tensor) -> Tensor:
    """``[B, num_heads, value_dim, key_dim]`` float32, the states of ``slots [B]``, zeros for -1; widths of
    values that are multiples of 32."""
    num_heads, key_dim, value_dim = state.shape[1:]
    packed = state.new_empty(slots.shape[0], num_heads, value_dim, key_dim, dtype=torch.float32)
    _move(slots, state, packed, to_pool=False)
    return packed


def scatter_states(packed: Tensor, slots: Tensor, state: Tensor) -> None:
    """Write what `gather_states` gives back into the pool; a slot of -1 takes nothing."""
    _move(slots, state, packed, to_pool=True)
