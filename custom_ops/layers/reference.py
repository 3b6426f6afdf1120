"""The specification of the ops around attention in plain torch.

Dimensions: T tokens, K inputs, N outputs, I intermediate size. Everything is computed in float32 (float64 for
float64 inputs) and rounded once, when it is stored: a norm or an activation inside ``linear`` is not rounded
before its product. Kernels that use tensor cores round the normed input once more, which the tests' error
budget allows.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpaged.custom_ops.layers.call import LinearCall, NormCall
from torchpaged.custom_ops.layers.check import (
    check_act_and_mul,
    check_embedding,
    check_gate_heads,
    check_linear,
    check_rms_norm,
)
from torchpaged.custom_ops.plain_torch import exact, gated


def _normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMSNorm (arXiv:1910.07467) of ``x [T, K]``, whose dtype is the accumulation's; the weight is
    ``offset + weight``."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight.detach().to(x.dtype))


def embedding(input_ids: Tensor, weight: Tensor, out: Tensor, *, scale: Tensor | None = None) -> None:
    """``out = weight[input_ids]``, times ``scale`` in weight's dtype if given."""
    check_embedding(input_ids, weight, out, scale=scale)
    rows = weight.detach().index_select(0, input_ids)
    out.copy_(rows if scale is None else rows * scale.to(weight.dtype))


def rms_norm(call: NormCall) -> None:
    """``out = x / rms(x) * (weight + offset)``; ``residual += x`` before it, ``+ post_residual`` after it.
    The unrounded sum is normed."""
    check_rms_norm(call)
    x, weight, out, eps, offset, residual, post_residual = call
    total = exact(x)
    if residual is not None:
        total = total + exact(residual)
        residual.detach().copy_(total)
    y = _normed(total, weight, eps, offset)
    out.copy_(y if post_residual is None else y + exact(post_residual))


def act_and_mul(gate_up: Tensor, out: Tensor, *, activation: str = "silu") -> None:
    """``out [T, I] = activation(gate) * up`` of ``gate_up [T, 2 * I]``."""
    check_act_and_mul(gate_up, out, activation=activation)
    out.copy_(gated(exact(gate_up), activation))


def gate_heads(x: Tensor, gate: Tensor, out: Tensor) -> None:
    """``out [T, num_heads, width] = x * sigmoid(gate)``."""
    check_gate_heads(x, gate, out)
    out.copy_(exact(x) * exact(gate).sigmoid())


def linear(call: LinearCall) -> None:
    """``out = gate((norm(x) @ weight.T + bias) * scale) + residual``: norm, gate, bias, scale and residual
    only where given."""
    check_linear(call)
    x, weight, out, bias, scale, residual, norm_weight, norm_eps, norm_offset, activation = call
    inputs = exact(x) if norm_weight is None else _normed(exact(x), norm_weight, norm_eps, norm_offset)
    y = F.linear(inputs, exact(weight), None if bias is None else exact(bias))
    if scale is not None:
        y = y * scale.detach()
    if activation != "none":
        y = gated(y, activation)
    out.copy_(y if residual is None else y + exact(residual))
