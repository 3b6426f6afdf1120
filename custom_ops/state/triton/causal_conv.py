"""causal_conv: a program per tile of a row's tokens and of channels; the one with a row's first tokens reads
and writes the row's state."""

import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.state.call import NORM_EPS, ConvCall
from torchpaged.custom_ops.state.check import check_causal_conv
from torchpaged.custom_ops.state.triton import conv_token
from torchpaged.custom_ops.state.triton.rows import row_of
from torchpaged.custom_ops.triton.find_row import find_row_of_tile
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2, require_floats

_TILE_CHANNELS = 256
_MAX_TILE_TOKENS = 16


@triton.jit
def load_inputs(at, channel, here, row, x, gate, state_at, state_row, WIDTH: tl.constexpr):
    """A row's inputs at places of its tokens, ``[places, channels]``, times their gate if there is one: those
    before its first token are the state's, if it is kept; zeros where there are none."""
    new = ((at >= row.first) & (at < row.count))[:, None] & here[None, :]
    token = (row.begin + at).to(tl.int64)[:, None]
    before = state_at + (at + WIDTH - 1)[:, None] * state_row + channel[None, :]
    seen = tl.load(x.ptr + token * x.row + channel[None, :], mask=new, other=0.0)
    if gate.ptr is not None:
        factor = tl.load(gate.ptr + token * gate.row + channel[None, :], mask=new, other=0.0)
        seen = (seen.to(tl.float32) * factor.to(tl.float32)).to(seen.dtype)
    kept = (at < 0) & (row.seq_len > row.count)
    return seen + tl.load(before, mask=kept[:, None] & here[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def causal_conv_kernel(
    num_reqs,
    num_tokens,
    x,
    weight,
    state,
    batch,
    out,
    bias_ptr,
    in_gate,
    out_gate,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SILU: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
    SHORT: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """``x``, ``weight``, ``out``, gates: `Matrix`; ``state``: `Window`; ``batch``: `Batch`. Grid: (tiles of
    tokens, tiles of channels); SHORT: a tile has all of a row's tokens, and the last one goes on behind them;
    ROWS: a power of two of at least WIDTH - 1. KEY_HEADS: 0, or, of `convolve_apart`, heads of
    queries and of keys, of TILE_CHANNELS numbers. PDL: launched early."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    req, part = tl.program_id(0), 0
    if SHORT:
        row = row_of(req, batch)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if not SHORT:
        req, part = find_row_of_tile(req, batch.starts, num_reqs, TILE_TOKENS)
        row = row_of(req, batch)
    begin, count, first = row.begin, row.count, row.first
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    here = channel < CHANNELS
    # The last row's programs have the tokens behind it, too: zeros.
    end = tl.where(req == num_reqs - 1, num_tokens - begin, count)
    state_at = state.ptr + row.slot * state.slot
    if part * TILE_TOKENS < end:
        stop = end if SHORT else tl.minimum(end, (part + 1) * TILE_TOKENS)
        for base in range(part * TILE_TOKENS, stop, TILE_TOKENS):
            token = base + tl.arange(0, TILE_TOKENS)
            live = (token >= first) & (token < count)
            acc = tl.zeros((TILE_TOKENS, TILE_CHANNELS), tl.float32)
            for w in tl.static_range(WIDTH):
                at = token - (WIDTH - 1) + w
                seen = load_inputs(at, channel, here, row, x, in_gate, state_at, state.row, WIDTH)
                factor = tl.load(weight.ptr + channel * weight.row + w, mask=here, other=0.0)
                acc += seen.to(tl.float32) * factor.to(tl.float32)[None, :]
            if bias_ptr is not None:
                acc += tl.load(bias_ptr + channel, mask=here, other=0.0).to(tl.float32)[None, :]
            if SILU:
                acc = acc / (1 + tl.exp(-acc))
            if out_gate.ptr is not None:
                place = out_gate.ptr + (begin + token).to(tl.int64)[:, None] * out_gate.row + channel[None, :]
                factors = tl.load(place, mask=live[:, None] & here[None, :], other=0.0)
                acc *= factors.to(tl.float32)
            acc = tl.where(live[:, None], acc, 0.0)
            to = (begin + token).to(tl.int64)[:, None]
            if KEY_HEADS > 0:
                WIDE: tl.constexpr = KEY_HEADS * TILE_CHANNELS
                region = tl.minimum(tl.program_id(1) // KEY_HEADS, 2)
                stride = WIDE
                if region == 2:
                    stride = CHANNELS - 2 * WIDE
                else:
                    acc = acc.to(out.ptr.dtype.element_ty).to(tl.float32)
                    acc *= tl.rsqrt(tl.sum(acc * acc, 1) + EPS)[:, None]
                target = out.ptr + region.to(tl.int64) * WIDE * num_tokens + to * stride
                target += (channel - region * WIDE)[None, :]
            else:
                target = out.ptr + to * out.row + channel[None, :]
            tl.store(target, acc.to(out.ptr.dtype.element_ty), mask=(token < end)[:, None] & here[None, :])
    if (part == 0) & (row.slot > 0):
        n = tl.arange(0, ROWS)
        inside = (n < WIDTH - 1)[:, None] & here[None, :]
        at = count - (WIDTH - 1) + n
        last = load_inputs(at, channel, here, row, x, in_gate, state_at, state.row, WIDTH)
        tl.debug_barrier()  # all of the old state is read, above too, before any of the new is written
        tl.store(state_at + n[:, None] * state.row + channel[None, :], last, mask=inside)


def causal_conv(call: ConvCall) -> None:
    """Launch; arguments as in ``custom_ops/state/schema.py``, in float32, bfloat16 or float16."""
    require_floats(x=call.x)
    check_causal_conv(call)
    if not call.state_slots.shape[0]:
        call.out.zero_()
    elif call.max_query_len == 1 and call.weight.shape[1] <= conv_token.MAX_WIDTH:
        conv_token.launch(call)
    else:
        _launch(call)


def convolve_apart(call: ConvCall, key_heads: int, key_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """A checked call of a delta net's queries, keys and values side by side, with requests and without gates,
    whose results lie in the memory of ``out``, which is contiguous, one after the other.

    Returns:
        q, k: ``[T, key_heads, key_dim]``, divided by their norms; v ``[T, num_heads, key_dim]``.
    """
    _launch(call, key_heads, key_dim)
    flat, (num_tokens, channels) = call.out.view(-1), call.out.shape
    sizes = [num_tokens * key_heads * key_dim] * 2
    parts = flat.split([*sizes, num_tokens * channels - sum(sizes)])
    q, k, v = (part.view(num_tokens, -1, key_dim) for part in parts)
    return q, k, v


def _launch(call: ConvCall, key_heads: int = 0, key_dim: int = 0) -> None:
    num_tokens, channels = call.x.shape
    num_reqs, width = call.state_slots.shape[0], call.weight.shape[1]
    # heads apart are narrower tiles
    most = 2 * _MAX_TILE_TOKENS if key_dim else _MAX_TILE_TOKENS
    tile_tokens = min(next_power_of_2(call.max_query_len), most)
    gated = call.in_gate is not None or call.out_gate is not None
    # whole tiles with gates do not fit into registers
    widest = _TILE_CHANNELS // 2 if gated and tile_tokens > 8 else _TILE_CHANNELS
    tile_channels = key_dim or min(next_power_of_2(channels), widest)
    short = call.max_query_len <= tile_tokens
    tiles = num_reqs if short else num_tokens // tile_tokens + num_reqs
    launch_kernel(
        causal_conv_kernel,
        (tiles, triton.cdiv(channels, tile_channels)),
        *conv_token.arguments(call),
        CHANNELS=channels,
        WIDTH=width,
        ROWS=next_power_of_2(width - 1),
        SILU=call.activation == "silu",
        TILE_TOKENS=tile_tokens,
        TILE_CHANNELS=tile_channels,
        SHORT=short,
        KEY_HEADS=key_heads,
        EPS=NORM_EPS,
        num_warps=4,
        **early_launch(call.x.device),
    )
