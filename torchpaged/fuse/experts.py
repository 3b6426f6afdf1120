"""Mixtures of experts of fused layers: router, experts and the expert that all tokens share, for few tokens.

A step: rms_norm, route_experts, apply_experts (with the residual add). More than 64 tokens run the module's
own forward, which is made for them. A mixture is known by its class, its parts and the way its router
chooses.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchpaged.activations import name_of_activation
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.experts.limits import MAX_TOKENS, MAX_TOP_K
from torchpaged.fuse.stacked import Stacked


# How routers choose, as options of `route_experts`:
def _softmax(block: Any) -> dict[str, Any]:
    """Of Qwen's kind and Mixtral's; those without a flag always norm."""
    return {"norm_eps": 0.0 if getattr(block.gate, "norm_topk_prob", True) else None}


def _softmax_in_groups(block: Any) -> dict[str, Any]:
    """Of DeepSeek-V2."""
    router = block.gate
    groups = {"num_groups": router.num_group, "top_groups": router.topk_group}
    return {"scale": float(router.routed_scaling_factor)} | (groups if router.topk_method != "greedy" else {})


def _sigmoid_in_groups(block: Any) -> dict[str, Any]:
    """Of DeepSeek-V3 and those that took it from there."""
    router = block.gate
    return {
        "bias": router.e_score_correction_bias,
        "scoring": "sigmoid",
        "num_groups": router.num_group,
        "top_groups": router.topk_group,
        "group_best": 2,
        "norm_eps": 1e-20 if router.norm_topk_prob else None,
        "scale": float(router.routed_scaling_factor),
    }


def _sigmoid(block: Any) -> dict[str, Any]:
    """Of LFM2's mixtures."""
    return {
        "bias": block.expert_bias if block.use_expert_bias else None,
        "scoring": "sigmoid",
        "norm_eps": 1e-6 if block.gate.norm_topk_prob else None,
        "scale": float(block.gate.routed_scaling_factor),
    }


#: Family -> how its router chooses.
ROUTERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "DeepseekV2": _softmax_in_groups,
    **dict.fromkeys(
        ("DeepseekV3", "Glm4Moe", "Glm4MoeLite", "AXK1", "KimiLinear", "BailingHybrid"), _sigmoid_in_groups
    ),
    **dict.fromkeys(("Mixtral", "Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Qwen3_5Moe"), _softmax),
    "Lfm2Moe": _sigmoid,
}


def _shared_of(block: Any) -> Any:
    """The MLP that all tokens share, or None."""
    return getattr(block, "shared_experts", getattr(block, "shared_expert", None))


def why_not_experts(block: Any, family: str) -> str | None:
    """Why the mixture ``block`` of a layer of ``family`` keeps its own forward."""
    if family not in ROUTERS:
        return "its mixture of experts has a router or experts that the ops do not know"
    found = {name: type(part).__name__ for name, part in block.named_children()}
    expected = {"experts": (f"{family}Experts",), "gate": (f"{family}TopkRouter", f"{family}TopKRouter")}
    expected |= dict.fromkeys(("shared_experts", "shared_expert"), (f"{family}MLP",))
    expected |= {"shared_expert_gate": ("Linear",), "post_mlp_layernorm": (f"{family}RMSNorm",)}
    unknown = [f"{name} ({kind})" for name, kind in found.items() if kind not in expected.get(name, ())]
    if unknown or not {"experts", "gate"} <= set(found):
        return f"its mixture of experts has {', '.join(unknown) or 'no experts or no gate'}"
    experts, shared, gate = block.experts, _shared_of(block), getattr(block, "shared_expert_gate", None)
    if getattr(getattr(experts, "config", None), "output_router_logits", False):
        return "its router's scores are collected (config.output_router_logits)"
    if getattr(experts, "_is_expert_parallel", False):
        return "its experts are sharded"
    linears = [] if shared is None else [shared.gate_proj, shared.up_proj, shared.down_proj]
    linears += [] if gate is None else [gate]
    if any(type(linear) is not nn.Linear or linear.bias is not None for linear in linears):
        return "its shared expert is not of plain linear layers without biases"
    weights = [experts.gate_up_proj, experts.down_proj, *(linear.weight for linear in linears)]
    if any(type(p.data) is not Tensor for p in (*weights, block.gate.weight)):
        return "its experts' weights are of a tensor subclass (quantised or sharded)"
    if len({(p.dtype, p.device) for p in weights}) != 1:
        return "its experts' weights differ in dtype or device"
    if block.gate.weight.dtype not in (weights[0].dtype, torch.float32):
        return f"its router's weight is {block.gate.weight.dtype}, which the op does not take"
    method = getattr(block.gate, "topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        return f"its router chooses by {method!r}, which the op does not know"
    acts = {name_of_activation(part.act_fn) for part in (experts, shared) if part is not None}
    if len(acts) > 1 or None in acts:
        return "its experts' activation is none of silu, gelu_tanh, gelu"
    if not 0 < block.gate.top_k <= MAX_TOP_K:
        return f"a token takes {block.gate.top_k} experts, more than {MAX_TOP_K}"
    return None


class ExpertsPlan:
    """What the fused forward of a mixture of experts uses.

    Args:
        block: the mixture; `why_not_experts` found nothing.
        family: of its layer.
    """

    def __init__(self, block: Any, family: str) -> None:
        self.block, self.routing = block, ROUTERS[family]
        self.shared = _shared_of(block)
        self.stacked = None if self.shared is None else Stacked([self.shared.gate_proj, self.shared.up_proj])
        self.activation = name_of_activation(block.experts.act_fn)
        self.post_norm = getattr(block, "post_mlp_layernorm", None)

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Whether ``x [T, hidden_size]`` are few tokens."""
        return x.shape[0] <= MAX_TOKENS

    def run(self, ops: BackendOps, h: Tensor, residual: Tensor | None) -> Tensor:
        """The mixture of ``h [T, hidden_size]``, and ``residual`` added."""
        experts, router = self.block.experts, self.block.gate
        ids = h.new_empty(h.shape[0], router.top_k, dtype=torch.int32)
        weights = h.new_empty(ids.shape, dtype=torch.float32)
        ops.route_experts(h, router.weight, ids, weights, **self.routing(self.block))
        options: dict[str, Any] = {"activation": self.activation, "residual": residual}
        if self.stacked is not None:
            options |= {"shared_gate_up": self.stacked.weight, "shared_down": self.shared.down_proj.weight}
            if hasattr(self.block, "shared_expert_gate"):
                options["shared_gate"] = self.block.shared_expert_gate.weight[0]
        out = torch.empty_like(h)
        ops.apply_experts(h, experts.gate_up_proj, experts.down_proj, ids, weights, out, **options)
        return out
