"""Argument checks of ``route_experts`` and ``apply_experts``, shared by the reference and the kernels'
launchers.

Only shapes, dtypes, devices, strides and address ranges: no device work, nothing waits. Every message names
the argument; all checks are done before anything is written.
"""

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import (
    ACTIVATIONS,
    check_device,
    check_dims,
    check_dtype,
    check_last_dim,
    check_tensor,
    given,
)
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.experts.call import ExpertsCall, RouteCall
from torchpaged.custom_ops.experts.limits import MAX_TOKENS, MAX_TOP_K
from torchpaged.custom_ops.memory import check_apart
from torchpaged.custom_ops.pools import FLOATS

SCORINGS = ("softmax", "sigmoid")


def _expect(name: str, fits: bool, expected: str, got: object) -> None:
    if not fits:
        raise ArgumentError(name, expected, str(got))


def check_route_experts(call: RouteCall) -> None:
    """Every argument of ``route_experts``; raises `ArgumentError` before anything is written."""
    x, weight, ids, weights, bias, scoring, num_groups, top_groups, group_best, norm_eps, _ = call
    check_tensor("x", x, (None, None), *FLOATS)
    check_tensor("weight", weight, (None, x.shape[1]), x.dtype, torch.float32)
    check_tensor("ids", ids, (x.shape[0], None), torch.int32)
    check_tensor("weights", weights, ids.shape, torch.float32)
    num_experts, top_k = weight.shape[0], ids.shape[1]
    if bias is not None:
        check_tensor("bias", bias, (num_experts,), x.dtype, torch.float32)
    _expect("scoring", scoring in SCORINGS, " or ".join(map(repr, SCORINGS)), repr(scoring))
    divides = num_groups > 0 and num_experts % num_groups == 0
    _expect("num_groups", divides, f"a divisor of {num_experts} experts", num_groups)
    _expect("top_groups", 0 < top_groups <= num_groups, f"1 to {num_groups} groups", top_groups)
    group = num_experts // num_groups
    _expect("group_best", 0 < group_best <= group, f"1 to {group} experts of a group", group_best)
    most = min(top_groups * group, MAX_TOP_K)
    _expect("ids", 0 < top_k <= most, f"1 to {most} experts per token", top_k)
    _expect("norm_eps", norm_eps is None or norm_eps >= 0, "None or a number >= 0", norm_eps)
    check_device(x.device, weight=weight, ids=ids, weights=weights, bias=bias)
    check_apart({"ids": ids, "weights": weights}, given(x=x, weight=weight, bias=bias), "use torch.empty")
    check_apart({"ids": ids}, {"weights": weights}, "use torch.empty")


def check_apply_experts(call: ExpertsCall) -> None:
    """Every argument of ``apply_experts``; raises `ArgumentError` before anything is written."""
    x, gate_up, down, ids, weights, out, activation, shared_gate_up, shared_down, shared_gate, residual = call
    check_dims("x", x, None, None)
    check_dtype("x", x, *FLOATS)
    tokens, hidden = x.shape
    _expect("x", tokens <= MAX_TOKENS, f"at most {MAX_TOKENS} tokens", tokens)
    check_dims("down", down, None, hidden, None)
    num_experts, _, inner = down.shape
    check_dims("gate_up", gate_up, num_experts, 2 * inner, hidden)
    check_dims("ids", ids, tokens, None)
    check_dtype("ids", ids, torch.int32)
    top_k = ids.shape[1]
    _expect("ids", 0 < top_k <= MAX_TOP_K, f"1 to {MAX_TOP_K} experts per token", top_k)
    check_dims("weights", weights, tokens, top_k)
    check_dtype("weights", weights, torch.float32)
    for name, tensor in (("ids", ids), ("weights", weights)):
        _expect(name, tensor.is_contiguous(), "a contiguous tensor", f"strides {tensor.stride()}")
    check_dims("out", out, tokens, hidden)
    _expect("activation", activation in ACTIVATIONS, " or ".join(map(repr, ACTIVATIONS)), repr(activation))
    if (shared_gate_up is None) != (shared_down is None):
        raise ArgumentError("shared_down", "both shared_gate_up and shared_down, or neither", "one of them")
    if shared_gate_up is not None and shared_down is not None:
        check_dims("shared_down", shared_down, hidden, None)
        check_dims("shared_gate_up", shared_gate_up, 2 * shared_down.shape[1], hidden)
    if shared_gate is not None:
        _expect("shared_gate", shared_down is not None, "None without shared_down", "a tensor")
        check_dims("shared_gate", shared_gate, hidden)
    if residual is not None:
        check_dims("residual", residual, tokens, hidden)
    read: dict[str, Tensor] = {"x": x, "gate_up": gate_up, "down": down} | given(
        shared_gate_up=shared_gate_up, shared_down=shared_down, shared_gate=shared_gate, residual=residual
    )
    for name, tensor in (*read.items(), ("out", out)):
        check_dtype(name, tensor, x.dtype)
        check_last_dim(**{name: tensor})
    read |= {"ids": ids, "weights": weights}
    check_device(x.device, **read, out=out)
    check_apart({"out": out}, read, "allocate it with torch.empty")
