"""causal_conv: a program per row, tile of channels and tile of tokens; the one with a row's first tokens
reads and writes the row's state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchpaged.custom_ops.checks import check_dtype
from torchpaged.custom_ops.state.call import ConvCall
from torchpaged.custom_ops.state.check import check_causal_conv
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import next_power_of_2, require_launchable

_TILE_CHANNELS = 256
_MAX_TILE_TOKENS = 16


@triton.jit
def row_of(req, slots_ptr, lens_ptr, starts_ptr):
    """A row's first token, its tokens, how many of these are padding, its slot and its length; slot 0 where
    it writes nothing."""
    begin = tl.load(starts_ptr + req)
    count = tl.load(starts_ptr + req + 1) - begin
    seq_len = tl.load(lens_ptr + req)
    slot = tl.load(slots_ptr + req)
    first = tl.minimum(tl.maximum(count - seq_len, 0), count)
    slot = tl.where(first < count, slot, 0)
    first = tl.where(slot > 0, first, count)
    return begin, count, first, slot.to(tl.int64), seq_len


@triton.jit
def load_inputs(
    at, channel, here, begin, first, count, kept, x_ptr, state_ptr, x_token, state_row, WIDTH: tl.constexpr
):
    """A row's inputs at places of its tokens, ``[places, channels]``: those before its first token are the
    state's, if it is kept; zeros where there are none."""
    new = (at >= first) & (at < count)
    x = x_ptr + (begin + at).to(tl.int64)[:, None] * x_token + channel[None, :]
    state = state_ptr + (at + WIDTH - 1)[:, None] * state_row + channel[None, :]
    seen = tl.load(x, mask=new[:, None] & here[None, :], other=0.0)
    return seen + tl.load(state, mask=((at < 0) & kept)[:, None] & here[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def causal_conv_kernel(
    num_reqs,
    num_tokens,
    x_ptr,
    weight_ptr,
    state_ptr,
    slots_ptr,
    lens_ptr,
    starts_ptr,
    out_ptr,
    bias_ptr,
    x_token,
    weight_channel,
    state_slot,
    state_row,
    out_token,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SILU: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    """Grid: (num_reqs, tiles of channels, tiles of tokens); ROWS: a power of two of at least WIDTH - 1."""
    req, part = tl.program_id(0), tl.program_id(2)
    begin, count, first, slot, seq_len = row_of(req, slots_ptr, lens_ptr, starts_ptr)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    here = channel < CHANNELS
    # The last row's programs have the tokens behind it, too: zeros.
    end = tl.where(req == num_reqs - 1, num_tokens - begin, count)
    kept = seq_len > count
    state_ptr += slot * state_slot
    if part * TILE_TOKENS < end:
        # the last program of the last row has all of the tokens behind it
        stop = tl.where(part == tl.num_programs(2) - 1, end, tl.minimum(end, (part + 1) * TILE_TOKENS))
        for base in range(part * TILE_TOKENS, stop, TILE_TOKENS):
            token = base + tl.arange(0, TILE_TOKENS)
            live = (token >= first) & (token < count)
            acc = tl.zeros((TILE_TOKENS, TILE_CHANNELS), tl.float32)
            for w in tl.static_range(WIDTH):
                seen = load_inputs(
                    token - (WIDTH - 1) + w,
                    channel,
                    here,
                    begin,
                    first,
                    count,
                    kept,
                    x_ptr,
                    state_ptr,
                    x_token,
                    state_row,
                    WIDTH,
                )
                weight = tl.load(weight_ptr + channel * weight_channel + w, mask=here, other=0.0)
                acc += seen.to(tl.float32) * weight.to(tl.float32)[None, :]
            if bias_ptr is not None:
                acc += tl.load(bias_ptr + channel, mask=here, other=0.0).to(tl.float32)[None, :]
            if SILU:
                acc = acc / (1 + tl.exp(-acc))
            acc = tl.where(live[:, None], acc, 0.0)
            target = out_ptr + (begin + token).to(tl.int64)[:, None] * out_token + channel[None, :]
            tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=(token < end)[:, None] & here[None, :])
    if (part == 0) & (slot > 0):
        row = tl.arange(0, ROWS)
        inside = (row < WIDTH - 1)[:, None] & here[None, :]
        last = load_inputs(
            count - (WIDTH - 1) + row,
            channel,
            here,
            begin,
            first,
            count,
            kept,
            x_ptr,
            state_ptr,
            x_token,
            state_row,
            WIDTH,
        )
        tl.debug_barrier()  # all of the old state is read, above too, before any of the new is written
        tl.store(state_ptr + row[:, None] * state_row + channel[None, :], last, mask=inside)


def causal_conv(call: ConvCall) -> None:
    """Launch; arguments as in ``custom_ops/state/schema.py``, in float32, bfloat16 or float16."""
    require_launchable(call.x)
    check_dtype("x", call.x, torch.bfloat16, torch.float16, torch.float32)
    check_causal_conv(call)
    num_tokens, channels = call.x.shape
    num_reqs, width = call.state_slots.shape[0], call.weight.shape[1]
    if not num_reqs:
        call.out.zero_()
        return
    tile_tokens = min(next_power_of_2(call.max_query_len), _MAX_TILE_TOKENS)
    tile_channels = min(next_power_of_2(channels), _TILE_CHANNELS)
    grid = (num_reqs, triton.cdiv(channels, tile_channels), triton.cdiv(call.max_query_len, tile_tokens))
    launch_kernel(
        causal_conv_kernel,
        grid,
        num_reqs,
        num_tokens,
        call.x,
        call.weight,
        call.conv_state,
        call.state_slots,
        call.seq_lens,
        call.query_start_loc,
        call.out,
        call.bias,
        call.x.stride(0),
        call.weight.stride(0),
        call.conv_state.stride(0),
        call.conv_state.stride(1),
        call.out.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        ROWS=next_power_of_2(width - 1),
        SILU=call.activation == "silu",
        TILE_TOKENS=tile_tokens,
        TILE_CHANNELS=tile_channels,
        num_warps=4,
    )
