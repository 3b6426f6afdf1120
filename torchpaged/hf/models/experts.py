"""Experts in a loop over those that were hit, which breaks a trace: forwards of ours compute the same in one
graph, wherever something is traced (dbrx, longcat_flash).

The modules' names and fields are not public; ``tests/hf/test_traceable.py`` compares each with what it
replaces under each supported transformers, and notices one that needs it no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchpaged.hf.attached import plain_of
from torchpaged.hf.families import Family, Function, register_family


def _routed(top_k_index: Tensor, top_k_weights: Tensor, num_experts: int) -> Tensor:
    """Weight of each expert for each token, ``[num_tokens, num_experts]``; 0 where it was not chosen."""
    zeros = top_k_weights.new_zeros(top_k_weights.shape[0], num_experts)
    return zeros.scatter_add(1, top_k_index, top_k_weights)


def _through_experts(
    states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    num_experts: int,
    run: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """The weighted sum over each token's experts, without a shape that depends on the routing.

    Few tokens take the weights of their own experts; many pass through every expert, so that no weight is
    copied per token.

    Args:
        states: ``[num_tokens, hidden_size]``.
        top_k_index, top_k_weights: ``[num_tokens, top_k]``.
        num_experts: that have weights.
        run: ``(x [count, rows, hidden_size], which experts [count] or None for all) -> the same shape``.
    """
    num_tokens, top_k = top_k_index.shape
    if num_tokens * top_k <= num_experts:
        each = states.repeat_interleave(top_k, 0)[:, None]
        found = run(each, top_k_index.flatten())[:, 0].view(num_tokens, top_k, -1)
        return (found * top_k_weights[..., None].to(found.dtype)).sum(1)
    found = run(states[None].expand(num_experts, -1, -1), None)
    shares = _routed(top_k_index, top_k_weights, num_experts).to(found.dtype)
    return torch.einsum("etd,te->td", found, shares)


def _chosen(weight: Tensor, which: Tensor | None) -> Tensor:
    return weight if which is None else weight[which]


def _dbrx_experts(module: Any) -> Function:
    plain = plain_of(module, "forward")

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() or self.training:
            return plain(self, hidden_states, top_k_index, top_k_weights)
        glu = self.mlp
        gate, up, down = (
            weight.view(self.num_experts, self.ffn_hidden_size, self.hidden_size)
            for weight in (glu.w1, glu.v1, glu.w2)
        )

        def run(x: Tensor, which: Tensor | None) -> Tensor:
            inner = glu.activation_fn(x @ _chosen(gate, which).mT) * (x @ _chosen(up, which).mT)
            return inner @ _chosen(down, which)

        flat = hidden_states.reshape(-1, self.hidden_size)
        out = _through_experts(flat, top_k_index, top_k_weights, self.num_experts, run)
        return out.view(hidden_states.shape)

    return "forward", forward


def _longcat_experts(module: Any) -> Function:
    """Those past the routed ones give a token back as it is."""
    plain = plain_of(module, "forward")

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        count = self.num_routed_experts
        if not torch.compiler.is_compiling() or self.training or count == 0:
            return plain(self, hidden_states, top_k_index, top_k_weights)

        def run(x: Tensor, which: Tensor | None) -> Tensor:
            gate, up = (x @ _chosen(self.gate_up_proj[:count], which).mT).chunk(2, dim=-1)
            return (self.act_fn(gate) * up) @ _chosen(self.down_proj, which).mT

        routed = top_k_index < count
        shares = top_k_weights.masked_fill(~routed, 0)
        out = _through_experts(hidden_states, top_k_index.clamp(max=count - 1), shares, count, run)
        kept = top_k_weights.masked_fill(routed, 0).sum(-1, keepdim=True)
        return (out + hidden_states * kept).to(hidden_states.dtype)

    return "forward", forward


register_family(Family(modules={"DbrxExperts": _dbrx_experts, "LongcatFlashExperts": _longcat_experts}))
