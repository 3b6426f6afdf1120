"""causal_conv of single tokens: what it reads of a state is read once, and what a row is and its taps before
the kernels ahead have ended."""

from typing import Any

import triton
import triton.language as tl

from torchpaged.custom_ops.state.call import ConvCall
from torchpaged.custom_ops.state.triton.records import Batch, Window
from torchpaged.custom_ops.state.triton.rows import row_of
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2
from torchpaged.custom_ops.triton.records import Matrix

#: The longest convolution that is taken.
MAX_WIDTH = 4
_TILE_CHANNELS = 256


@triton.jit
def load_tap(weight, channel, here, n: tl.constexpr):
    """Number ``n`` of each channel's weights, float32."""
    return tl.load(weight.ptr + channel * weight.row + n, mask=here, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def conv_token_kernel(
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
    SILU: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `causal_conv_kernel`. Grid: (num_reqs, tiles of channels); a thread has the same channels of every
    input of its row's state, so that it may write them as soon as it has read them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    req = tl.program_id(0)
    row = row_of(req, batch)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    here = channel < CHANNELS
    t0 = load_tap(weight, channel, here, WIDTH - 1)
    t1 = load_tap(weight, channel, here, WIDTH - 2)
    if WIDTH > 2:
        t2 = load_tap(weight, channel, here, WIDTH - 3)
    if WIDTH > 3:
        t3 = load_tap(weight, channel, here, WIDTH - 4)
    bias = tl.zeros((TILE_CHANNELS,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=here, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    live = row.first < row.count
    token = (row.begin + row.first).to(tl.int64)
    new = tl.load(x.ptr + token * x.row + channel, mask=here & live, other=0.0)
    if in_gate.ptr is not None:
        factor = tl.load(in_gate.ptr + token * in_gate.row + channel, mask=here & live, other=0.0)
        new = (new.to(tl.float32) * factor.to(tl.float32)).to(new.dtype)
    last = state.ptr + row.slot * state.slot + (WIDTH - 2) * state.row + channel
    kept = here & live & (row.seq_len > row.count)
    s1 = tl.load(last, mask=kept, other=0.0)
    acc = bias + t0 * new.to(tl.float32) + t1 * s1.to(tl.float32)
    if WIDTH > 2:
        s2 = tl.load(last - state.row, mask=kept, other=0.0)
        acc += t2 * s2.to(tl.float32)
    if WIDTH > 3:
        s3 = tl.load(last - 2 * state.row, mask=kept, other=0.0)
        acc += t3 * s3.to(tl.float32)
    if SILU:
        acc = acc / (1 + tl.exp(-acc))
    if out_gate.ptr is not None:
        factor = tl.load(out_gate.ptr + token * out_gate.row + channel, mask=here & live, other=0.0)
        acc *= factor.to(tl.float32)
    # Zeros of tokens without a state, and of those behind the last row, which its programs have.
    end = tl.where(req == num_reqs - 1, num_tokens - row.begin, row.count)
    for i in range(end):
        at = out.ptr + (row.begin + i).to(tl.int64) * out.row + channel
        y = tl.where((i >= row.first) & (i < row.count), acc, 0.0)
        tl.store(at, y.to(out.ptr.dtype.element_ty), mask=here)
    tl.store(last, new, mask=here & live)
    if WIDTH > 2:
        tl.store(last - state.row, s1, mask=here & live)
    if WIDTH > 3:
        tl.store(last - 2 * state.row, s2, mask=here & live)


def arguments(call: ConvCall) -> tuple[Any, ...]:
    """What both kernels take by place."""
    batch = Batch(call.state_slots, call.seq_lens, call.query_start_loc)
    records = (
        Matrix.of(call.x),
        Matrix.of(call.weight),
        Window.of(call.conv_state),
        batch,
        Matrix.of(call.out),
    )
    gates = Matrix.of(call.in_gate), Matrix.of(call.out_gate)
    return call.state_slots.shape[0], call.x.shape[0], *records, call.bias, *gates


def launch(call: ConvCall) -> None:
    """Launch a checked call of rows of one token at most, with requests; no longer than `MAX_WIDTH`."""
    channels = call.x.shape[1]
    tile = min(next_power_of_2(channels), _TILE_CHANNELS)
    launch_kernel(
        conv_token_kernel,
        (call.state_slots.shape[0], triton.cdiv(channels, tile)),
        *arguments(call),
        CHANNELS=channels,
        WIDTH=call.weight.shape[1],
        SILU=call.activation == "silu",
        TILE_CHANNELS=tile,
        num_warps=4,
        **early_launch(call.x.device),
    )
