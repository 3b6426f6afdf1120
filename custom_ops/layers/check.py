"""Argument checks of the ops around attention, shared by the reference and the kernels' launchers.

Only shapes, dtypes, devices, strides and address ranges: no device work, nothing waits. Token ids alone are
read, where the rules of `validation` allow it. Every message names the argument; all checks are done before
anything is written.
"""

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import (
    ACTIVATIONS,
    check_device,
    check_dims,
    check_dtype,
    check_tensor,
    reads_values,
)
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.layers.call import LinearCall, NormCall
from torchpaged.custom_ops.memory import check_own_elements, overlap
from torchpaged.custom_ops.plain_torch import exact_dtype
from torchpaged.custom_ops.pools import FLOATS


def _check_like(x: Tensor, rows: int, width: int, **tensors: Tensor | None) -> None:
    """Every tensor given is ``[rows, width]`` of x's dtype with a contiguous last dimension."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_tensor(name, tensor, (rows, width), x.dtype)


def _check_apart(name: str, target: Tensor, **sources: Tensor | None) -> None:
    check_own_elements(name, target)
    for source_name, source in sources.items():
        if source is not None and overlap(target, source):
            raise ArgumentError(
                name,
                f"memory apart from {source_name}'s",
                "overlapping tensors",
                "allocate it with torch.empty",
            )


def _check_norm(x: Tensor, name: str, weight: Tensor, eps: float, eps_name: str) -> None:
    check_tensor(name, weight, x.shape[1:], x.dtype, torch.float32)
    if not eps > 0:
        raise ArgumentError(eps_name, "a positive number", str(eps))


def _check_activation(activation: str, width: int, name: str, *others: str) -> None:
    if activation not in ACTIVATIONS and activation not in others:
        raise ArgumentError("activation", " or ".join(map(repr, (*ACTIVATIONS, *others))), repr(activation))
    if activation not in others and width % 2:
        raise ArgumentError(
            name, "an even number of rows or columns: the gate's, then as many of up", str(width)
        )


def check_embedding(input_ids: Tensor, weight: Tensor, out: Tensor, *, scale: Tensor | None = None) -> None:
    """Every argument of ``embedding``; raises `ArgumentError` before anything is written."""
    check_tensor("input_ids", input_ids, (None,), torch.int64)
    check_tensor("weight", weight, (None, None), *FLOATS)
    _check_like(weight, input_ids.shape[0], weight.shape[1], out=out)
    if scale is not None:
        check_dims("scale", scale)
        check_dtype("scale", scale, *FLOATS)
    check_device(input_ids.device, weight=weight, out=out, scale=scale)
    _check_apart("out", out, weight=weight, scale=scale)
    if input_ids.numel() and reads_values(input_ids.device):
        wrong = input_ids[(input_ids < 0) | (input_ids >= weight.shape[0])]
        if wrong.numel():
            raise ArgumentError("input_ids", f"ids in [0, {weight.shape[0]})", str(wrong[0].item()))


def check_rms_norm(call: NormCall) -> None:
    """Every argument of ``rms_norm``; raises `ArgumentError` before anything is written."""
    x, weight, out, eps, _, residual, post_residual = call
    check_tensor("x", x, (None, None), *FLOATS)
    _check_norm(x, "weight", weight, eps, "eps")
    _check_like(x, *x.shape, out=out, residual=residual, post_residual=post_residual)
    check_device(x.device, weight=weight, out=out, residual=residual, post_residual=post_residual)
    _check_apart("out", out, x=x, weight=weight, residual=residual, post_residual=post_residual)
    if residual is not None:
        _check_apart("residual", residual, x=x, weight=weight, post_residual=post_residual)


def check_act_and_mul(gate_up: Tensor, out: Tensor, *, activation: str = "silu") -> None:
    """Every argument of ``act_and_mul``; raises `ArgumentError` before anything is written."""
    check_tensor("gate_up", gate_up, (None, None), *FLOATS)
    _check_activation(activation, gate_up.shape[1], "gate_up")
    _check_like(gate_up, gate_up.shape[0], gate_up.shape[1] // 2, out=out)
    check_device(gate_up.device, out=out)
    _check_apart("out", out, gate_up=gate_up)


def check_gate_heads(x: Tensor, gate: Tensor, out: Tensor) -> None:
    """Every argument of ``gate_heads``; raises `ArgumentError` before anything is written."""
    check_tensor("x", x, (None, None, None), *FLOATS)
    check_tensor("gate", gate, (*x.shape[:2], 1 if gate.shape[-1:] == (1,) else x.shape[2]), x.dtype)
    check_tensor("out", out, tuple(x.shape), x.dtype)
    check_device(x.device, gate=gate, out=out)
    _check_apart("out", out, x=x, gate=gate)


def check_linear(call: LinearCall) -> None:
    """Every argument of ``linear``; raises `ArgumentError` before anything is written."""
    x, weight, out, bias, scale, residual, norm_weight, norm_eps, norm_offset, activation = call
    check_tensor("x", x, (None, None), *FLOATS)
    check_tensor("weight", weight, (None, x.shape[1]), x.dtype)
    width = weight.shape[0]
    _check_activation(activation, width, "weight", "none")
    _check_like(x, x.shape[0], width if activation == "none" else width // 2, out=out, residual=residual)
    if bias is not None:
        check_tensor("bias", bias, (width,), x.dtype)
    if scale is not None:
        check_tensor("scale", scale, (width,), exact_dtype(x.dtype))
    if norm_weight is not None:
        _check_norm(x, "norm_weight", norm_weight, norm_eps, "norm_eps")
    elif norm_offset:
        raise ArgumentError(
            "norm_offset", "0 without norm_weight", str(norm_offset), "give the weight of the norm"
        )
    read = {"bias": bias, "scale": scale, "residual": residual, "norm_weight": norm_weight}
    check_device(x.device, weight=weight, out=out, **read)
    _check_apart("out", out, x=x, weight=weight, **read)
