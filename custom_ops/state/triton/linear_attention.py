"""linear_attention: a program per row, head and tile of value columns, whose part of the state stays in
registers while it goes through the row's tokens one by one. Batches of single tokens: linear_decode.py; long
rows: chunks.py."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.state.call import LinearAttentionCall
from torchpaged.custom_ops.state.check import check_linear_attention
from torchpaged.custom_ops.state.triton.chunks import SHORT, Kernels, attend_in_chunks, has_long_rows
from torchpaged.custom_ops.state.triton.linear_decode import linear_decode_kernel, split_decay
from torchpaged.custom_ops.state.triton.records import Batch, Sizes, State
from torchpaged.custom_ops.state.triton.rows import EPS, row_of
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2, require_floats
from torchpaged.custom_ops.triton.records import Matrix, Tokens

#: Numbers of a state that a program holds, and a warp: 64 registers of each thread.
_TILE, _WARP = 8192, 2048
MAX_KEY_DIM = 512


class Tiles(NamedTuple):
    """Value columns of a program, and its warps."""

    value: int
    num_warps: int


def tiles(key_dim: int, value_dim: int) -> Tiles:
    """By the sizes of a head alone."""
    keys = next_power_of_2(key_dim)
    value = min(next_power_of_2(value_dim), max(_TILE // keys, 8))
    return Tiles(value, max(keys * value // _WARP, 1))


def of_decode(state: Tensor, tile: Tiles) -> dict[str, Any]:
    """Of the decode kernel, as measured on an H200 (docs/log/state_decode.md): states of two bytes do better
    with more programs at a time."""
    small = state.element_size() == 2
    options: dict[str, Any] = {"EVICT": "evict_first" if small else ""}
    if small and tile.num_warps == 4 and torch.version.hip is None:
        options["maxnreg"] = 128
    return options


@triton.jit
def load_key(ptr, here, NORMALIZE: tl.constexpr):
    """A key or query in float32."""
    x = tl.load(ptr, mask=here, other=0.0).to(tl.float32)
    if NORMALIZE:
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) + EPS)
    return x


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def recurrent_kernel(
    num_reqs, num_tokens, scale, q, k, v, g, beta, batch, state, out, SIZES: tl.constexpr, PDL: tl.constexpr
):
    """Grid: (num_reqs * heads * tiles of values,), tiles fastest; ``q, k, v, g, out``: `Tokens`; ``beta``:
    `Matrix`; SIZES: `Sizes`."""
    TILE: tl.constexpr = SIZES.tile
    VALUE_TILES: tl.constexpr = (SIZES.value_dim + TILE - 1) // TILE
    pid = tl.program_id(0)
    head = pid // VALUE_TILES % SIZES.heads
    req = pid // (VALUE_TILES * SIZES.heads)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin, count, first, slot, seq_len = row_of(req, batch)
    if (SIZES.short > 0) & (count > SIZES.short):
        return
    n = tl.arange(0, SIZES.key_pad)
    d = pid % VALUE_TILES * TILE + tl.arange(0, TILE)
    of_key, of_value = n < SIZES.key_dim, d < SIZES.value_dim
    place = state.ptr + slot * state.slot + head * state.head + n[:, None] * state.row + d[None, :]
    inside = of_key[:, None] & of_value[None, :]
    kept = (slot > 0) & (seq_len > count)
    matrix = tl.load(place, mask=inside & kept, other=0.0).to(tl.float32)
    to = out.ptr + head * out.head + d
    nothing = tl.zeros((TILE,), out.ptr.dtype.element_ty)
    begin = begin.to(tl.int64)
    for i in range(first):
        tl.store(to + (begin + i) * out.token, nothing, mask=of_value)
    for i in range(first, count):
        token = begin + i
        q_place = q.ptr + token * q.token + head // SIZES.group * q.head + n
        k_place = k.ptr + token * k.token + head // SIZES.group * k.head + n
        query = load_key(q_place, of_key, SIZES.normalize) * scale
        key = load_key(k_place, of_key, SIZES.normalize)
        u = tl.load(v.ptr + token * v.token + head * v.head + d, mask=of_value, other=0.0).to(tl.float32)
        gate = g.ptr + token * g.token + head * g.head
        if SIZES.by_key:
            decay, most, rest = split_decay(tl.load(gate + n, mask=of_key, other=0.0)[:, None])
        else:
            decay, most, rest = split_decay(tl.load(gate))
        if SIZES.delta:
            u -= tl.sum(matrix * (decay * key[:, None]), axis=0)
        if beta.ptr is not None:
            u *= tl.load(beta.ptr + token * beta.row + head).to(tl.float32)
        matrix = matrix * most + (matrix * rest + key[:, None] * u[None, :])
        y = tl.sum(matrix * query[:, None], axis=0)
        tl.store(to + token * out.token, y.to(out.ptr.dtype.element_ty), mask=of_value)
    if slot > 0:
        tl.store(place, matrix.to(state.ptr.dtype.element_ty), mask=inside)
    # The last row's programs have the tokens behind it, too.
    if (SIZES.short == 0) & (req == num_reqs - 1):
        for rest in range(count, num_tokens - begin):
            tl.store(to + (begin + rest) * out.token, nothing, mask=of_value)


def linear_attention(
    call: LinearAttentionCall, kernels_of: Callable[[LinearAttentionCall], Kernels | None] = lambda call: None
) -> None:
    """Launch; arguments as in ``custom_ops/state/schema.py``, in float32, bfloat16 or float16.
    ``kernels_of``: what takes the place of those for long rows, of a checked call."""
    require_floats(v=call.v)
    check_linear_attention(call)
    q, k, v, g, state, out = call.q, call.k, call.v, call.g, call.state, call.out
    num_tokens, num_heads, value_dim = v.shape
    num_reqs, key_dim = call.state_slots.shape[0], q.shape[2]
    if key_dim > MAX_KEY_DIM:
        raise ArgumentError("q", f"keys of at most {MAX_KEY_DIM} for the triton backend", f"{key_dim}")
    if not num_reqs:
        out.zero_()
        return
    in_chunks = has_long_rows(call)
    if in_chunks:
        attend_in_chunks(call, kernels_of(call))
    tile = tiles(key_dim, value_dim)
    grid = (num_reqs * num_heads * triton.cdiv(value_dim, tile.value),)
    arguments = (
        num_reqs,
        num_tokens,
        call.scale,
        *map(Tokens.of, (q, k, v, g)),
        Matrix.of(call.beta),
        Batch(call.state_slots, call.seq_lens, call.query_start_loc),
        State.of(state),
        Tokens.of(out),
    )
    sizes = Sizes.of(call, tile.value, SHORT if in_chunks else 0)
    options = {"SIZES": sizes, "num_warps": tile.num_warps}
    if call.max_query_len == 1:
        launch_kernel(linear_decode_kernel, grid, *arguments, **options, **of_decode(state, tile))
    else:
        early = early_launch(v.device)  # behind long rows it has nothing to do, mostly
        launch_kernel(recurrent_kernel, grid, *arguments, **options, **early)
