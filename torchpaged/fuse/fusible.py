"""Which decoder layers `fuse` knows, and which of its passes each one allows, with the reason where not.

A layer is known by its class name, the class names of its parts and its set of parts: all must be as in
transformers 5.17 - 5.23. Replaced, quantised, hooked or sharded parts make a layer unknown: it is left alone
as a whole. ``PASSES`` names the passes.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpaged.model_state import hooks_of

#: The passes in the order of a layer's step; "lm_head" and "embedding" belong to the model.
PASSES = ("qkv", "rope", "norm", "gate_up", "lm_head", "embedding")
#: transformers' activation classes -> the name of `act_and_mul`. One of them with another way of computing it
#: is refused.
ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh", "GELUActivation": "gelu"}
#: Rotations whose table depends on the length of the text: rotary_emb must run.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


class Architecture(NamedTuple):
    """What one family's decoder layers do, beyond what they are made of.

    ``norm_offset``: added to the norms' weights. ``post_norms``: norms after attention and MLP, before the
        residual adds.
    ``soft_cap``: attention caps its logits. ``half_table``: rotary_emb gives each cosine once instead
        of twice.
    ``rotation``: of latent attention, as ``rope_write_latent`` has it; "pairs_to_halves" where the config's
        ``rope_interleave`` says so, else "halves". Empty: attention over keys and values.
    ``experts``: the class of MLPs that are mixtures of experts, in some of its layers.
    ``scales_residuals``: what a block gives is multiplied by the layer's ``residual_scale``.
    ``scales_head``: so is what lm_head gets of the final norm.
    """

    family: str
    norm_offset: float = 0.0
    post_norms: bool = False
    qk_norm: bool = False
    soft_cap: bool = False
    sinks: bool = False
    gated_mlp: bool = True
    half_table: bool = False
    rotation: str = ""
    experts: str = ""
    scales_residuals: bool = False
    scales_head: bool = False

    def has_gated_mlp(self, layer: Any) -> bool:
        """Whether the MLP of ``layer`` is one of a gate, up and down projection."""
        return self.gated_mlp and type(layer.mlp).__name__ != self.experts

    def attention_parts(self, attn: Any) -> tuple[list[str], list[str]]:
        """Linear layers and norms of an attention module, by name."""
        if not self.rotation:
            return [f"{x}_proj" for x in "qkvo"], ["q_norm", "k_norm"] if self.qk_norm else []
        q = ["q_proj"] if getattr(attn, "q_lora_rank", None) is None else ["q_a_proj", "q_b_proj"]
        return (
            [*q, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
            [*(["q_a_layernorm"] if len(q) == 2 else []), "kv_a_layernorm"],
        )


_FAMILIES = (
    Architecture("Llama"),
    Architecture("Mistral"),
    Architecture("Qwen2"),
    Architecture("Qwen3", qk_norm=True),
    Architecture("SmolLM3"),
    Architecture("Gemma2", norm_offset=1.0, post_norms=True, soft_cap=True),
    Architecture("Gemma3", norm_offset=1.0, post_norms=True, qk_norm=True),
    Architecture("GptOss", sinks=True, gated_mlp=False, half_table=True),
    Architecture("DeepseekV2", rotation="pairs", half_table=True, experts="DeepseekV2Moe"),
    Architecture("DeepseekV3", rotation="pairs_to_halves", experts="DeepseekV3MoE"),
    Architecture("Glm4MoeLite", rotation="pairs_to_halves", experts="Glm4MoeLiteMoE"),
    Architecture("AXK1", rotation="pairs_to_halves", experts="AXK1MoE"),
    Architecture("Youtu", rotation="pairs_to_halves"),
    Architecture("MiniCPM3", rotation="halves", scales_residuals=True, scales_head=True),
)
#: Class name of a decoder layer -> its architecture.
ARCHITECTURES = {f"{architecture.family}DecoderLayer": architecture for architecture in _FAMILIES}


def norm_of(norm: Any, offset: float) -> tuple[Tensor, float, float]:
    """``(weight, eps, offset)`` of an RMSNorm module; the families name eps in two ways."""
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return norm.weight, float(eps), offset


def activation_of(mlp: Any) -> str | None:
    """The activation of a gated MLP by the op's name, or None."""
    act = mlp.act_fn
    # "gelu_python": the same formula, but not torch's function
    if getattr(getattr(act, "act", None), "__self__", None) is act:
        return None
    return ACTIVATIONS.get(type(act).__name__)


def _norms(architecture: Architecture) -> list[str]:
    names = ["input_layernorm", "post_attention_layernorm"]
    return (
        [*names, "pre_feedforward_layernorm", "post_feedforward_layernorm"]
        if architecture.post_norms
        else names
    )


def why_unknown(layer: Any) -> str | None:
    """Why no pass may touch ``layer``; None for a layer that is what its architecture says."""
    name = type(layer).__name__
    architecture = ARCHITECTURES.get(name)
    if architecture is None or not type(layer).__module__.startswith("transformers.models."):
        return f"{name} is none of the known layers ({', '.join(a.family for a in _FAMILIES)})"
    family, norms = architecture.family, _norms(architecture)
    parts = {"self_attn": f"{family}Attention", "mlp": f"{family}MLP"} | dict.fromkeys(
        norms, f"{family}RMSNorm"
    )
    if architecture.experts and type(getattr(layer, "mlp", None)).__name__ == architecture.experts:
        parts["mlp"] = architecture.experts
    if set(dict(layer.named_children())) != set(parts):
        return f"its parts are {sorted(dict(layer.named_children()))}, expected {sorted(parts)}"
    for part, class_name in parts.items():
        if type(getattr(layer, part)).__name__ != class_name:
            return f"{part} is a {type(getattr(layer, part)).__name__}, expected {class_name}"
    attention = [*itertools.chain(*architecture.attention_parts(layer.self_attn))]
    if set(dict(layer.self_attn.named_children())) != set(attention):
        return f"self_attn has {sorted(dict(layer.self_attn.named_children()))}, expected {sorted(attention)}"
    return "the layer has a forward of its own" if "forward" in vars(layer) else why_changed(layer)


def why_changed(layer: Any) -> str | None:
    """Why no pass may touch a layer of known parts, or may go on; its own forward may be ours."""
    architecture = ARCHITECTURES[type(layer).__name__]
    linears = [f"self_attn.{x}" for x in architecture.attention_parts(layer.self_attn)[0]]
    if architecture.has_gated_mlp(layer):
        linears += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    for path in linears:
        kind = type(layer.get_submodule(path))
        if kind is not nn.Linear:  # its module, too: adapter libraries have a Linear of their own
            return f"{path} is a {kind.__module__}.{kind.__name__}, expected a plain Linear"
    for path, module in layer.named_modules():
        if path and hooks_of(module):
            return f"{path} has forward hooks, which a fused layer would not call"
        if path and "forward" in vars(module):
            return f"{path} has a forward of its own"
    used = [layer.get_submodule(path) for path in linears]
    weights = [p for module in used for p in module.parameters(recurse=False)]
    if any(type(p.data) is not Tensor for p in weights):
        return "its weights are of a tensor subclass (quantised or sharded)"
    if len({(p.dtype, p.device) for p in weights}) != 1:
        return "its weights differ in dtype or device"
    if weights[0].is_meta or weights[0].dtype not in (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
    ):
        return f"its weights are {weights[0].dtype} on {weights[0].device}, which the ops do not take"
    norms = [module for module in layer.modules() if type(module).__name__ == f"{architecture.family}RMSNorm"]
    if any(norm.weight.dtype not in (weights[0].dtype, torch.float32) for norm in norms):
        return "its norms' weights have another dtype than its linear layers'"
    return None


def why_not(layer: Any, name: str) -> str | None:
    """Why pass ``name`` does not apply to a known ``layer``."""
    architecture = ARCHITECTURES[type(layer).__name__]
    attn, mlp = layer.self_attn, layer.mlp
    if name == "qkv":
        names = first_projections(attn) if architecture.rotation else ("q_proj", "k_proj", "v_proj")
        if len({getattr(attn, each).bias is None for each in names}) > 1:
            return f"only some of {', '.join(names)} have a bias"
    if name == "gate_up":
        if not architecture.has_gated_mlp(layer):
            return "its MLP is a mixture of experts, which is left alone"
        if activation_of(mlp) is None:
            return f"its activation {type(mlp.act_fn).__name__} is none of silu, gelu_tanh, gelu"
        if (mlp.gate_proj.bias is None) != (mlp.up_proj.bias is None):
            return "only one of gate and up has a bias"
    if name == "rope" and architecture.qk_norm and attn.q_norm.weight.dtype != attn.k_norm.weight.dtype:
        return "q_norm and k_norm differ in dtype"
    return None


def first_projections(attn: Any) -> tuple[str, str]:
    """Of latent attention: those that take the layer's input."""
    return "q_proj" if attn.q_lora_rank is None else "q_a_proj", "kv_a_proj_with_mqa"


def rotary_dim(attn: Any) -> int:
    """Numbers of a head that are rotated."""
    return int(attn.qk_rope_head_dim if hasattr(attn, "qk_rope_head_dim") else attn.head_dim)


def why_no_table(rotary: Any, layer_type: str | None) -> str | None:
    """Why the rotation of ``rotary_emb`` can't come from one table."""
    kind = rotary.rope_type[layer_type] if isinstance(rotary.rope_type, dict) else rotary.rope_type
    if any(word in kind for word in _LENGTH_DEPENDENT):
        return f"its rotation ({kind}) depends on the length of the text, so no table holds it"
    return None
