"""apply_experts on a CPU: products in the dtype of the weights, of which none is converted; of few tokens by
the op ``linear``, which reads weights at the rate of memory (docs/log/products_cpu.md), of others torch's."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpaged.custom_ops.experts.call import ExpertsCall
from torchpaged.custom_ops.experts.check import check_apply_experts
from torchpaged.custom_ops.plain_torch import exact_dtype, gated

#: Tokens of an expert, at most, whose products are the op's.
FEW = 32


def _products(x: Tensor, weight: Tensor, experts: list[int], counts: list[int]) -> Tensor:
    """``x [pairs, width]`` times the transposed ``weight [num_experts, columns, width]``: that of the first
    expert for the first of ``counts`` pairs, and so on."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    first = 0
    for expert, count in zip(experts, counts, strict=True):
        mine, its = x[first : first + count], y[first : first + count]
        if count <= FEW:
            torch.ops.torchpaged.linear.cpu(mine, weight[expert], its)
        else:
            torch.mm(mine, weight[expert].T, out=its)
        first += count
    return y


def apply_experts(call: ExpertsCall) -> None:
    """Arguments: ``custom_ops/experts/schema.py``. Products are rounded to the dtype of x, as in a model's
    own layers; they are summed in float32, over float64 in float64."""
    check_apply_experts(call)
    own: Any = (part.detach() if isinstance(part, Tensor) else part for part in call)
    x, gate_up, down, ids, weights, out, activation, shared_gate_up, shared_down, shared_gate, residual = own
    exact = exact_dtype(x.dtype)
    y = x.new_zeros(x.shape, dtype=exact) if residual is None else residual.to(exact, copy=True)
    by_expert, order = ids.flatten().sort(stable=True)
    here = (by_expert >= 0) & (by_expert < gate_up.shape[0])
    by_expert, order = by_expert[here], order[here]
    experts, counts = (each.tolist() for each in by_expert.unique_consecutive(return_counts=True))
    tokens = order.div(ids.shape[1], rounding_mode="floor")
    inner = gated(_products(x[tokens], gate_up, experts, counts), activation)
    parts = _products(inner, down, experts, counts)
    y.index_add_(0, tokens, parts * weights.flatten()[order, None].to(exact))
    if shared_gate_up is not None:
        shared = F.linear(gated(F.linear(x, shared_gate_up), activation), shared_down).to(exact)
        y += shared if shared_gate is None else shared * (x @ shared_gate).to(exact).sigmoid()[:, None]
    out.copy_(y)
