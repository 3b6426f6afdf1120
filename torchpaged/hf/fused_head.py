"""The final norm inside lm_head: the forwards that the pass "lm_head" of `torchpaged.hf.fuse` gives to three modules.

Only forwards over a paged cache differ: the norm hands its input on, and lm_head is `linear` with the norm. Nothing here is called by hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchpaged.hf.fused_layers import paged_layer
from torchpaged.hf.fusible import ARCHITECTURES, norm_of
from torchpaged.hf.layer import PagedOwner


class Head:
    """The final norm and lm_head as one: the norm hands its input on while ``owner`` is set, and lm_head norms it.

    ``owner`` is set for the time of one paged forward; forwards of one model must not overlap in threads.
    """

    def __init__(self, norm: nn.Module, offset: float) -> None:
        self.norm, self.offset = norm, offset
        self.owner: PagedOwner | None = None


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """The final norm's forward: nothing while lm_head norms."""
    result: Tensor = hidden_states if self._torchpaged_head.owner is not None else type(self).forward(self, hidden_states)
    return result


def head_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """lm_head's forward, with the norm."""
    head: Head = self._torchpaged_head
    if head.owner is None:
        result: Tensor = type(self).forward(self, hidden_states)
        return result
    weight, eps, offset = norm_of(head.norm, head.offset)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    out = x.new_empty(x.shape[0], self.out_features)
    head.owner.ops.linear(x, self.weight, out, bias=self.bias, norm_weight=weight, norm_eps=eps, norm_offset=offset)
    return out.view(*hidden_states.shape[:-1], self.out_features)


def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The causal LM's forward. Asked for hidden states, it keeps the final norm: the last of them is normed."""
    head: Head = self._torchpaged_head
    wants = kwargs.get("output_hidden_states")
    if wants is None:
        wants = getattr(self.config, "output_hidden_states", False)
    cached = None if args or wants else paged_layer(kwargs.get("past_key_values"), 0)
    if cached is None:
        return type(self).forward(self, *args, **kwargs)
    head.owner = cached.owner
    try:
        return type(self).forward(self, **kwargs)
    finally:
        head.owner = None


def wrapped_forward(model: Any) -> Any:
    """`_model_forward` with the signature of the model's own forward, which generate() reads."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _model_forward(self, *args, **kwargs)

    forward.__wrapped__ = type(model).forward  # type: ignore[attr-defined]
    return forward


def why_no_head(model: Any, base: Any) -> str | None:
    """Why the pass does not apply to a causal LM ``model`` with the decoder ``base``, or None."""
    head: Any = getattr(model, "lm_head", None)
    norm: Any = getattr(base, "norm", None)
    names = {f"{architecture.family}RMSNorm" for architecture in ARCHITECTURES.values()}
    if getattr(model, "model", None) is not base or not type(model).__name__.endswith("ForCausalLM"):
        return f"{type(model).__name__} is no causal LM of the known kind"
    if type(head) is not nn.Linear or type(head.weight.data) is not Tensor:
        return f"lm_head is a {type(head).__name__}, expected a plain Linear"
    if type(norm).__name__ not in names or not type(norm).__module__.startswith("transformers.models."):
        return f"the final norm is a {type(norm).__name__}, expected one of the known families'"
    if norm.weight.dtype not in (head.weight.dtype, torch.float32):
        return f"the final norm is {norm.weight.dtype}, lm_head {head.weight.dtype}"
    if head._forward_hooks or head._forward_pre_hooks or norm._forward_hooks or norm._forward_pre_hooks:
        return "lm_head or the final norm has forward hooks"
    if any("forward" in vars(module) for module in (model, head, norm)):
        return "the model, lm_head or the final norm has a forward of its own"
    return None
