"""Argument checks of the state ops, shared by the reference and the kernels."""

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.batch_values import check_starts
from torchpaged.custom_ops.checks import (
    check_device,
    check_dims,
    check_softmax,
    check_tensor,
    given,
    reads_values,
    shape_of,
)
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.memory import check_apart
from torchpaged.custom_ops.plain_torch import exact_dtype
from torchpaged.custom_ops.pools import FLOATS
from torchpaged.custom_ops.state.call import ConvCall, GatedNormCall, GatesCall, LinearAttentionCall, Rows

#: Widths of a convolution.
MIN_WIDTH, MAX_WIDTH = 2, 8
ACTIVATIONS, GATE_ACTIVATIONS = ("none", "silu"), ("silu", "sigmoid")


def check_batch(call: Any, pool: Tensor) -> None:
    """Slots, lengths and starts; values where they are read."""
    num_reqs = call.state_slots.shape[0] if call.state_slots.dim() == 1 else None
    batch = {
        "state_slots": (call.state_slots, num_reqs),
        "seq_lens": (call.seq_lens, num_reqs),
        "query_start_loc": (call.query_start_loc, None if num_reqs is None else num_reqs + 1),
    }
    for name, (tensor, size) in batch.items():
        check_tensor(name, tensor, (size,), torch.int32)
        check_device(pool.device, **{name: tensor})
    if call.max_query_len < 1:
        raise ArgumentError("max_query_len", "at least 1", str(call.max_query_len))
    if reads_values(pool.device):
        _check_values(call, pool.shape[0])


def _check_values(call: Any, num_slots: int) -> None:
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
    check_tensor("x", x, (None, None), *FLOATS)
    channels = x.shape[1]
    check_tensor("weight", weight, (channels, None), x.dtype)
    if not MIN_WIDTH <= weight.shape[1] <= MAX_WIDTH:
        raise ArgumentError("weight", f"a width of {MIN_WIDTH} to {MAX_WIDTH}", shape_of(weight))
    check_tensor("conv_state", conv_state, (None, weight.shape[1] - 1, channels), x.dtype)
    check_tensor("out", out, x.shape, x.dtype)
    if bias is not None:
        check_tensor("bias", bias, (channels,), x.dtype)
    gates = given(in_gate=call.in_gate, out_gate=call.out_gate)
    for name, tensor in gates.items():
        check_tensor(name, tensor, x.shape, x.dtype)
    if call.activation not in ACTIVATIONS:
        raise ArgumentError("activation", f"one of {', '.join(ACTIVATIONS)}", repr(call.activation))
    check_device(conv_state.device, x=x, weight=weight, out=out, bias=bias, **gates)
    read = given(x=x, weight=weight, bias=bias) | gates
    check_apart({"conv_state": conv_state}, read | {"out": out}, "pass a copy: .clone()")
    check_apart({"out": out}, read, "allocate out with torch.empty")
    check_batch(call, conv_state)


def check_linear_attention(call: LinearAttentionCall) -> None:
    """Every argument of ``linear_attention``; raises `ArgumentError` before anything is written."""
    q, k, v, g, state, out, beta = call.q, call.k, call.v, call.g, call.state, call.out, call.beta
    check_tensor("v", v, (None, None, None), *FLOATS)
    num_tokens, num_heads, value_dim = v.shape
    exact = exact_dtype(v.dtype)
    check_tensor("q", q, (num_tokens, None, None), v.dtype)
    if not q.shape[1] or num_heads % q.shape[1]:
        raise ArgumentError("q", f"a number of heads that divides v's {num_heads}", shape_of(q))
    check_tensor("k", k, q.shape, v.dtype)
    check_tensor("state", state, (None, num_heads, q.shape[2], value_dim), v.dtype, exact)
    if min(state.shape) < 1:
        raise ArgumentError("state", "at least one slot, head, row and column", shape_of(state))
    check_tensor("out", out, v.shape, v.dtype, exact)
    check_tensor("g", g, (num_tokens, num_heads, *(q.shape[2:] if g.dim() == 3 else ())), exact)
    if beta is not None:
        check_tensor("beta", beta, (num_tokens, num_heads), v.dtype, exact)
    check_softmax(call.scale)
    check_device(state.device, q=q, k=k, v=v, g=g, out=out, beta=beta)
    read = given(q=q, k=k, v=v, g=g, beta=beta)
    check_apart({"state": state}, read | {"out": out}, "pass a copy: .clone()")
    check_apart({"out": out}, read, "allocate out with torch.empty")
    check_batch(call, state)


def _check_groups(name: str, x: Tensor, num_tokens: int, width: int, *dtypes: torch.dtype) -> None:
    """``[num_tokens, groups, *]``, ``width`` numbers per token."""
    check_tensor(name, x, (num_tokens, None, None), *dtypes)
    if x.shape[1] * x.shape[2] != width:
        raise ArgumentError(name, f"groups of {width} numbers per token in all", shape_of(x))


def check_delta_gates(call: GatesCall) -> None:
    """Every argument of ``delta_gates``; raises `ArgumentError` before anything is written."""
    a, b, a_log, dt_bias, g, beta = call[:6]
    check_tensor("a", a, (None, None, None), *FLOATS)
    num_tokens, columns = a.shape[0], a.shape[1] * a.shape[2]
    check_dims("a_log", a_log, None)
    num_heads = a_log.shape[0]
    if columns % num_heads if num_heads else columns:
        raise ArgumentError("a_log", f"a number of heads that divides a's {columns} numbers", shape_of(a_log))
    if a.shape[1] and num_heads % a.shape[1]:
        raise ArgumentError("a", f"a number of groups that divides {num_heads} heads", shape_of(a))
    if b is not None:
        check_dims("b", b, num_tokens, a.shape[1], None)
        _check_groups("b", b, num_tokens, num_heads, a.dtype)
    if not call.min_step >= 0:
        raise ArgumentError("min_step", "a number of at least 0", str(call.min_step))
    if call.max_step is not None and not call.max_step >= call.min_step:
        raise ArgumentError("max_step", f"None or at least min_step, {call.min_step}", str(call.max_step))
    if call.bound is not None and not call.bound < 0:
        raise ArgumentError("bound", "None or a number below 0", str(call.bound))
    for name, tensor, size in (("a_log", a_log, num_heads), ("dt_bias", dt_bias, columns)):
        check_tensor(name, tensor, (size,), a.dtype, torch.float32)
    exact = exact_dtype(a.dtype)
    for name, tensor, size in (("g", g, columns), ("beta", beta, columns if b is None else num_heads)):
        check_tensor(name, tensor, (num_tokens, size), exact)
    check_device(a.device, b=b, a_log=a_log, dt_bias=dt_bias, g=g, beta=beta)
    read = given(a=a, b=b, a_log=a_log, dt_bias=dt_bias)
    check_apart({"g": g}, read | {"beta": beta}, "allocate it with torch.empty")
    check_apart({"beta": beta}, read, "allocate it with torch.empty")


def check_gated_rms_norm(call: GatedNormCall) -> None:
    """Every argument of ``gated_rms_norm``; raises `ArgumentError` before anything is written."""
    x, gate, weight, out, eps = call[:5]
    check_tensor("x", x, (None, None, None), *FLOATS)
    _check_groups("gate", gate, x.shape[0], x.shape[1] * x.shape[2], x.dtype)
    if x.shape[2] and gate.shape[2] % x.shape[2]:
        raise ArgumentError("gate", f"whole heads of {x.shape[2]} in each group", shape_of(gate))
    of_groups = x.shape[1:2] if weight.dim() == 2 else ()
    check_tensor("weight", weight, (*of_groups, x.shape[2]), x.dtype, torch.float32)
    skip, skip_weight = call.skip, call.skip_weight
    if (skip is None) != (skip_weight is None):
        raise ArgumentError("skip_weight", "a tensor with skip, and None without", type(skip_weight).__name__)
    if skip is not None and skip_weight is not None:
        _check_groups("skip", skip, x.shape[0], x.shape[1] * x.shape[2], x.dtype)
        check_tensor("skip_weight", skip_weight, (skip.shape[1],), x.dtype, torch.float32)
    check_tensor("out", out, x.shape, x.dtype)
    if not eps > 0:
        raise ArgumentError("eps", "a positive number", str(eps))
    if call.activation not in GATE_ACTIVATIONS:
        said = f"one of {', '.join(GATE_ACTIVATIONS)}"
        raise ArgumentError("activation", said, repr(call.activation))
    read = given(x=x, gate=gate, weight=weight, skip=skip, skip_weight=skip_weight)
    check_device(x.device, out=out, **read)
    check_apart({"out": out}, read, "allocate it with torch.empty")
