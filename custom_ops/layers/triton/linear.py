"""linear, composed: the norm's kernel, torch's matrix product (cuBLAS), the gate's kernel.

At many tokens this is what wins, since the product takes nearly all of the time; the ``cuda`` backend has one
kernel for few tokens and comes here for the rest. The normed input and the product before a gate are rounded
to x's dtype in between.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from torchpaged.custom_ops.layers.call import LinearCall, NormCall
from torchpaged.custom_ops.layers.check import check_linear
from torchpaged.custom_ops.layers.triton import act_and_mul, rms_norm
from torchpaged.custom_ops.triton.launching import require_floats

#: ``out = x @ weight.T + bias + residual`` of ``(x, weight, out, bias, residual)``.
Product = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], None]


def linear(call: LinearCall) -> None:
    """Launch the parts; arguments as in ``custom_ops/layers/schema.py``, in float32, bfloat16 or float16."""
    require_floats(x=call.x)
    check_linear(call)
    compose(call, torch_product)


def compose(call: LinearCall, product: Product) -> None:
    """The parts without checks, in order."""
    x, weight, out, bias, scale, residual, norm_weight, norm_eps, norm_offset, activation = call
    if not x.shape[0]:
        return
    with torch.no_grad():  # torch refuses out= with parameters that require a gradient
        inputs = x
        if norm_weight is not None:
            inputs = x.new_empty(x.shape)
            rms_norm.launch(NormCall(x, norm_weight, inputs, norm_eps, norm_offset))
        if activation != "none":
            gate_up = x.new_empty(x.shape[0], weight.shape[0])
            product(inputs, weight, gate_up, bias, None)
            if scale is not None:
                gate_up.mul_(scale)
            act_and_mul.launch(gate_up, out, activation)
            if residual is not None:
                out.add_(residual)
        elif scale is None:
            product(inputs, weight, out, bias, residual)
        else:
            product(inputs, weight, out, bias, None)
            if residual is None:
                out.mul_(scale)
            else:
                torch.addcmul(residual, out, scale, out=out)


def torch_product(
    x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None
) -> None:
    """``out = x @ weight.T + bias + residual``; one addend goes into the product's epilogue."""
    addend = residual if bias is None else bias
    if addend is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(addend, x, weight.t(), out=out)
    if bias is not None and residual is not None:
        out.add_(residual)
