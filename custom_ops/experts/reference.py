"""The specification of the ops of mixtures of experts (``route_experts``, ``apply_experts``) in plain torch.

Dimensions: T tokens, E experts, k of them for a token, I inner numbers of an expert, S of the shared one.
Everything is computed in float32 (float64 for float64 inputs) and rounded once, when it is stored; kernels
round the inner numbers, too, which the tests' error budget allows.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpaged.custom_ops.experts.call import ExpertsCall, RouteCall
from torchpaged.custom_ops.experts.check import check_apply_experts, check_route_experts
from torchpaged.custom_ops.plain_torch import exact, gated


def _first(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` highest of each row, NaN before all; of equals the lowest."""
    return (
        scores.nan_to_num(torch.inf, torch.inf, -torch.inf)
        .sort(dim=-1, descending=True, stable=True)
        .indices[..., :count]
    )


def route_experts(call: RouteCall) -> None:
    """``ids`` and ``weights [T, k]``; see schema.py."""
    check_route_experts(call)
    x, weight, ids, weights, bias, scoring, num_groups, top_groups, group_best, norm_eps, scale = call
    logits = F.linear(exact(x), exact(weight, x))
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + exact(bias, x)
    candidates = torch.arange(weight.shape[0], device=x.device).expand(x.shape[0], -1)
    if top_groups < num_groups:
        grouped = choice.unflatten(1, (num_groups, -1))
        of_group = grouped.gather(2, _first(grouped, group_best)).sum(2)
        groups = _first(of_group, top_groups).sort(1).values
        candidates = candidates.unflatten(1, (num_groups, -1))
        candidates = candidates.gather(1, groups[..., None].expand(-1, -1, candidates.shape[2])).flatten(1)
    chosen = candidates.gather(1, _first(choice.gather(1, candidates), ids.shape[1]))
    shares = scores.gather(1, chosen)
    if norm_eps is not None:
        shares = shares / (shares.sum(1, keepdim=True) + norm_eps)
    ids.copy_(chosen)
    weights.copy_(shares * scale)


def _expert(x: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    return F.linear(gated(F.linear(x, exact(gate_up, x)), activation), exact(down, x))


def apply_experts(call: ExpertsCall) -> None:
    """``out [T, hidden_size]``; see schema.py."""
    check_apply_experts(call)
    x, gate_up, down, ids, weights, out, activation, shared_gate_up, shared_down, shared_gate, residual = call
    inputs = exact(x)
    parts = inputs.new_zeros(*ids.shape, x.shape[1])
    for expert in ids.unique().tolist():
        if 0 <= expert < gate_up.shape[0]:
            token, j = (ids == expert).nonzero(as_tuple=True)
            parts[token, j] = _expert(inputs[token], gate_up[expert], down[expert], activation)
    here = (ids >= 0) & (ids < gate_up.shape[0])
    y = (parts * weights.to(parts.dtype).masked_fill(~here, 0)[..., None]).sum(1)
    if shared_gate_up is not None and shared_down is not None:
        shared = _expert(inputs, shared_gate_up, shared_down, activation)
        if shared_gate is not None:
            shared = shared * (inputs @ exact(shared_gate, x)).sigmoid()[:, None]
        y = y + shared
    out.copy_(y if residual is None else y + exact(residual, x))
