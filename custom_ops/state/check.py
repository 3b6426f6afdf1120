"""Argument checks of ``causal_conv`` and ``linear_attention``, shared by the reference and the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.custom_ops.batch_values import check_starts
from torchpaged.custom_ops.checks import (
    check_apart,
    check_device,
    check_dims,
    check_dtype,
    check_last_dim,
    check_softmax,
    given,
    reads_values,
    shape_of,
)
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.pools import FLOATS
from torchpaged.custom_ops.state.call import ConvCall, LinearAttentionCall, Rows

#: Widths of a convolution.
MIN_WIDTH, MAX_WIDTH = 2, 8
ACTIVATIONS = ("none", "silu")


def _check_batch(call: ConvCall | LinearAttentionCall, pool: Tensor) -> None:
    """Slots, lengths and starts; values where they are read."""
    num_reqs = call.state_slots.shape[0] if call.state_slots.dim() == 1 else None
    batch = {
        "state_slots": (call.state_slots, num_reqs),
        "seq_lens": (call.seq_lens, num_reqs),
        "query_start_loc": (call.query_start_loc, None if num_reqs is None else num_reqs + 1),
    }
    for name, (tensor, size) in batch.items():
        check_dims(name, tensor, size)
        check_dtype(name, tensor, torch.int32)
        check_last_dim(**{name: tensor})
        check_device(pool.device, **{name: tensor})
    if call.max_query_len < 1:
        raise ArgumentError("max_query_len", "at least 1", str(call.max_query_len))
    if reads_values(pool.device):
        _check_values(call, pool.shape[0])


def _check_values(call: ConvCall | LinearAttentionCall, num_slots: int) -> None:
    check_starts("query_start_loc", call.query_start_loc, call.out.shape[0])
    if not call.state_slots.shape[0]:
        return
    longest = int(call.query_start_loc.diff().max())
    if longest > call.max_query_len:
        raise ArgumentError(
            "max_query_len", f"at least the longest query ({longest})", str(call.max_query_len)
        )
    low, high = (int(x) for x in torch.aminmax(call.state_slots))
    if low < 0 or high >= num_slots:
        raise ArgumentError("state_slots", f"slots in [0, {num_slots})", f"values in [{low}, {high}]")
    slots = Rows.of(call).slots.sort().values
    twice = (slots[1:] == slots[:-1]) & (slots[1:] > 0)
    if bool(twice.any()):
        raise ArgumentError(
            "state_slots",
            "one request per slot (slot 0 excepted)",
            f"slot {int(slots[1:][twice][0])} several times",
        )


def check_causal_conv(call: ConvCall) -> None:
    """Every argument of ``causal_conv``; raises `ArgumentError` before anything is written."""
    x, weight, conv_state, out, bias = call.x, call.weight, call.conv_state, call.out, call.bias
    check_dims("x", x, None, None)
    check_dtype("x", x, *FLOATS, torch.float64)
    channels = x.shape[1]
    check_dims("weight", weight, channels, None)
    if not MIN_WIDTH <= weight.shape[1] <= MAX_WIDTH:
        raise ArgumentError("weight", f"a width of {MIN_WIDTH} to {MAX_WIDTH}", shape_of(weight))
    check_dims("conv_state", conv_state, None, weight.shape[1] - 1, channels)
    check_dims("out", out, x.shape[0], channels)
    for name, tensor in (("weight", weight), ("conv_state", conv_state), ("out", out)):
        check_dtype(name, tensor, x.dtype)
    if bias is not None:
        check_dims("bias", bias, channels)
        check_dtype("bias", bias, x.dtype)
        check_last_dim(bias=bias)
    if call.activation not in ACTIVATIONS:
        raise ArgumentError("activation", f"one of {', '.join(ACTIVATIONS)}", repr(call.activation))
    check_last_dim(x=x, weight=weight, conv_state=conv_state, out=out)
    check_device(conv_state.device, x=x, weight=weight, out=out, bias=bias)
    read = given(x=x, weight=weight, bias=bias)
    check_apart({"conv_state": conv_state}, read | {"out": out}, "pass a copy: .clone()")
    check_apart({"out": out}, read, "allocate out with torch.empty")
    _check_batch(call, conv_state)


def check_linear_attention(call: LinearAttentionCall) -> None:
    """Every argument of ``linear_attention``; raises `ArgumentError` before anything is written."""
    q, k, v, g, state, out, beta = call.q, call.k, call.v, call.g, call.state, call.out, call.beta
    check_dims("v", v, None, None, None)
    check_dtype("v", v, *FLOATS, torch.float64)
    num_tokens, num_heads, value_dim = v.shape
    check_dims("q", q, num_tokens, None, None)
    if not q.shape[1] or num_heads % q.shape[1]:
        raise ArgumentError("q", f"a number of heads that divides v's {num_heads}", shape_of(q))
    check_dims("k", k, *q.shape)
    check_dims("state", state, None, num_heads, q.shape[2], value_dim)
    if min(state.shape) < 1:
        raise ArgumentError("state", "at least one slot, head, row and column", shape_of(state))
    check_dims("out", out, *v.shape)
    for name, tensor in (("q", q), ("k", k)):
        check_dtype(name, tensor, v.dtype)
    exact = torch.float64 if v.dtype == torch.float64 else torch.float32
    check_dtype("out", out, v.dtype, exact)
    check_dtype("state", state, v.dtype, exact)
    check_dtype("g", g, exact)
    check_dims("g", g, num_tokens, num_heads, *(q.shape[2:] if g.dim() == 3 else ()))
    if beta is not None:
        check_dims("beta", beta, num_tokens, num_heads)
        check_dtype("beta", beta, v.dtype, exact)
        check_last_dim(beta=beta)
    check_softmax(call.scale)
    check_last_dim(q=q, k=k, v=v, g=g, state=state, out=out)
    check_device(state.device, q=q, k=k, v=v, g=g, out=out, beta=beta)
    read = given(q=q, k=k, v=v, g=g, beta=beta)
    check_apart({"state": state}, read | {"out": out}, "pass a copy: .clone()")
    check_apart({"out": out}, read, "allocate out with torch.empty")
    _check_batch(call, state)
