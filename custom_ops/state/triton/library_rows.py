"""Rows as a library's kernel of gated delta nets wants them: tokens without gaps between them, normalised,
gates by themselves, and states of few rows side by side."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.state.call import LinearAttentionCall
from torchpaged.custom_ops.state.triton.records import Batch, State
from torchpaged.custom_ops.state.triton.rows import EPS, row_of
from torchpaged.custom_ops.triton.find_row import find_row_of_tile
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import next_power_of_2
from torchpaged.custom_ops.triton.records import Matrix, Tokens

TILE = tl.constexpr(32)  # tokens of a program; columns of a state


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


class LibrarySizes(NamedTuple):
    """What the kernel is compiled for; ``copies``: heads to copy, those of q, k and v, or none; pads: powers
    of 2."""

    key_heads: int
    heads: int
    heads_pad: int
    copies: int
    key_dim: int
    key_pad: int
    value_dim: int
    value_pad: int
    normalize: bool


@triton.jit
def copy_tokens(
    x, to, tile, head, HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, NORMALIZE: tl.constexpr
):
    """One head of a tile's tokens; zeros of those that are not live."""
    token, live, inside = tile
    d = tl.arange(0, PAD)
    here = live[:, None] & (d < DIM)[None, :]
    rows = tl.load(x.ptr + token[:, None] * x.token + head * x.head + d[None, :], mask=here, other=0.0)
    if NORMALIZE:
        wide = rows.to(tl.float32)
        rows = wide * tl.rsqrt(tl.sum(wide * wide, 1) + EPS)[:, None]
    at = to + (token[:, None] * HEADS + head) * DIM + d[None, :]
    tl.store(at, rows.to(to.dtype.element_ty), mask=inside[:, None] & (d < DIM)[None, :])


@triton.jit
def gates_of_tokens(g, beta, out, rows, tile, behind, SIZES: tl.constexpr):
    """Decays and betas of a tile's tokens, and zeros of ``out`` behind the last row."""
    VALUE_PAD: tl.constexpr = SIZES.value_pad
    token, live, inside = tile
    h = tl.arange(0, SIZES.heads_pad)
    of_head = (h < SIZES.heads)[None, :]
    here = live[:, None] & of_head
    decay = tl.exp(tl.load(g.ptr + token[:, None] * g.row + h[None, :], mask=here, other=0.0))
    to = token[:, None] * SIZES.heads + h[None, :]
    tl.store(rows.decay + to, decay, mask=inside[:, None] & of_head)
    factor = here.to(tl.float32)
    if beta.ptr is not None:
        place = beta.ptr + token[:, None] * beta.row + h[None, :]
        factor = tl.load(place, mask=here, other=0.0).to(tl.float32)
    tl.store(rows.beta + to, factor, mask=inside[:, None] & of_head)
    if tl.max(behind.to(tl.int32), 0) > 0:
        d = tl.arange(0, VALUE_PAD)[None, :]
        for head in range(SIZES.heads):
            zeros_to = out.ptr + token[:, None] * out.token + head * out.head + d
            nothing = tl.zeros((TILE, VALUE_PAD), out.ptr.dtype.element_ty)
            tl.store(zeros_to, nothing, mask=behind[:, None] & (d < SIZES.value_dim))


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def library_rows_kernel(num_reqs, num_tokens, q, k, v, g, beta, batch, out, rows, SIZES: tl.constexpr):
    """Grid: (num_tokens // TILE + num_reqs, copies + 1); ``q, k, v, out``: `Tokens`, ``rows``: `LibraryRows`.
    Also zeros of ``out`` behind the last row."""
    req, part = find_row_of_tile(tl.program_id(0), batch.starts, num_reqs, TILE)
    head = tl.program_id(1)
    begin, count, first, slot, seq_len = row_of(req, batch)
    at = part * TILE + tl.arange(0, TILE)
    token = begin.to(tl.int64) + at
    end = tl.where(req == num_reqs - 1, num_tokens - begin, count)
    inside = at < end
    live = (at >= first) & (at < count) & (slot > 0)
    KEYS: tl.constexpr = SIZES.key_heads
    NORMALIZE: tl.constexpr = SIZES.normalize
    tile = (token, live, inside)
    if head == SIZES.copies:
        gates_of_tokens(g, beta, out, rows, tile, inside & (at >= count), SIZES)
    elif head < KEYS:
        copy_tokens(q, rows.q, tile, head, KEYS, SIZES.key_dim, SIZES.key_pad, NORMALIZE)
    elif head < 2 * KEYS:
        copy_tokens(k, rows.k, tile, head - KEYS, KEYS, SIZES.key_dim, SIZES.key_pad, NORMALIZE)
    else:
        copy_tokens(v, rows.v, tile, head - 2 * KEYS, SIZES.heads, SIZES.value_dim, SIZES.value_pad, False)
    if (head == 0) & (part == 0):
        writes = tl.where(slot > 0, slot, -1)
        tl.store(rows.writes + req, writes)
        tl.store(rows.reads + req, tl.where(seq_len > count, writes, -1))


def library_rows(call: LinearAttentionCall) -> LibraryRows:
    """What the library is called with, on the device from end to end."""
    given = call.q, call.k, call.v
    return _rows(call, *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in given))


def rows_of_parts(call: LinearAttentionCall) -> LibraryRows:
    """The same where q, k and v are what `convolve_apart` gives: no copies but of gates."""
    return _rows(call, call.q, call.k, call.v)


def _rows(call: LinearAttentionCall, q: Tensor, k: Tensor, v: Tensor) -> LibraryRows:
    num_reqs, (num_tokens, num_heads, value_dim) = call.state_slots.shape[0], v.shape
    _, key_heads, key_dim = q.shape
    copies = 0 if q is call.q else 2 * key_heads + num_heads
    gates = (call.g.new_empty(num_tokens, num_heads, dtype=torch.float32) for _ in range(2))
    slots = (call.state_slots.new_empty(num_reqs) for _ in range(2))
    rows = LibraryRows(q, k, v, *gates, *slots)
    heads_pad, *pads = map(next_power_of_2, (num_heads, key_dim, value_dim))
    widths = key_dim, pads[0], value_dim, pads[1]
    launch_kernel(
        library_rows_kernel,
        (num_tokens // TILE.value + num_reqs, copies + 1),
        *(num_reqs, num_tokens, *map(Tokens.of, (call.q, call.k, call.v))),
        *(*map(Matrix.of, (call.g, call.beta)), Batch(call.state_slots, call.seq_lens, call.query_start_loc)),
        *(Tokens.of(call.out), rows),
        SIZES=LibrarySizes(key_heads, num_heads, heads_pad, copies, *widths, call.normalize),
        num_warps=4,
    )
    return rows


@triton.jit
def move_states_kernel(
    slots_ptr, state, packed_ptr, SHAPE: tl.constexpr, KEY_PAD: tl.constexpr, TO_POOL: tl.constexpr
):
    """Grid: (num_reqs * heads * value_dim / TILE,); ``state``: `State`; SHAPE: of a slot's."""
    HEADS: tl.constexpr = SHAPE[0]
    KEY_DIM: tl.constexpr = SHAPE[1]
    VALUE_DIM: tl.constexpr = SHAPE[2]
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
        (slots.shape[0] * num_heads * (value_dim // TILE.value),),
        *(slots, State.of(state), packed),
        SHAPE=(num_heads, key_dim, value_dim),
        KEY_PAD=next_power_of_2(key_dim),
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
