"""Which decoder layers `fuse` knows, and which of its passes each one allows, with the reason where not.

A layer is known by its class name, the class names of its parts and its set of parts: all must be as in
transformers 5.17 - 5.24. Replaced, quantised, hooked or sharded parts make a layer unknown: it is left alone
as a whole. ``PASSES`` names the passes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torchpaged.activations import name_of_activation
from torchpaged.few_tokens import is_foreign, own_forward, rotations_beside
from torchpaged.fuse.experts import why_not_experts
from torchpaged.fuse.families import ARCHITECTURES
from torchpaged.fuse.multipliers import why_not_multiplied
from torchpaged.hf.packed_mixers import is_packed, is_served
from torchpaged.model_state import LENGTH_DEPENDENT, hooks_of

#: The passes in the order of a layer's step; "lm_head" and "embedding" belong to the model.
PASSES = ("qkv", "rope", "norm", "gate_up", "experts", "lm_head", "embedding")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def norm_of(norm: Any, offset: float) -> tuple[Tensor, float, float]:
    """``(weight, eps, offset)`` of an RMSNorm module; the families name eps in two ways."""
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return norm.weight, float(eps), offset


def activation_of(layer: Any) -> str | None:
    """The op's name for the activation of a layer's gated MLP, or None."""
    architecture = ARCHITECTURES[type(layer).__name__]
    if architecture.activation:
        return architecture.activation
    return name_of_activation(getattr(architecture.mlp_of(layer), architecture.names.activation))


def why_unknown(layer: Any) -> str | None:
    """Why no pass may touch ``layer``; None for a layer that is what its architecture says."""
    name = type(layer).__name__
    architecture = ARCHITECTURES.get(name)
    if architecture is None or not type(layer).__module__.startswith("transformers.models."):
        return f"{name} is none of the known layers ({', '.join(a.family for a in ARCHITECTURES.values())})"
    family, names = architecture.family, architecture.names
    norms = dict.fromkeys((*names.norms, *names.post_norms), f"{family}RMSNorm")
    mixers = architecture.mixers_of(layer)
    parts = norms | {mixer.name: family + mixer.kind for mixer in mixers}
    if architecture.mixes_and_feeds or not architecture.mixes(layer):
        mixture = type(architecture.mlp_of(layer)).__name__ == architecture.experts
        parts[names.mlp] = architecture.experts if mixture else f"{family}MLP"
    if architecture.beside_of(layer) is not None:
        parts[architecture.beside[0]] = family + architecture.beside[1]
    if set(dict(layer.named_children())) != set(parts):
        return f"its parts are {sorted(dict(layer.named_children()))}, expected {sorted(parts)}"
    for part, class_name in parts.items():
        if type(getattr(layer, part)).__name__ != class_name:
            return f"{part} is a {type(getattr(layer, part)).__name__}, expected {class_name}"
    if own_forward(layer) is not None:
        return "the layer has a forward of its own"
    for mixer in mixers:
        inner, expected = dict(getattr(layer, mixer.name).named_children()), mixer.parts(family)
        if set(inner) != set(expected):
            return f"{mixer.name} has {sorted(inner)}, expected {sorted(expected)}"
        for part, class_name in expected.items():
            if class_name and type(inner[part]).__name__ not in class_name.split("|"):
                return f"{mixer.name}.{part} is a {type(inner[part]).__name__}, expected {class_name}"
        if mixer is architecture.state and not is_served(getattr(layer, mixer.name)):
            return f"{mixer.name}'s convolution has a width or an activation that the op does not take"
    return (why_not_multiplied(layer) if architecture.multiplied else None) or why_changed(layer)


def why_changed(layer: Any) -> str | None:
    """Why no pass may touch a layer of known parts, or may go on; its own forward may be ours."""
    architecture = ARCHITECTURES[type(layer).__name__]
    names = architecture.names
    linears = [f"{mixer.name}.{x}" for mixer in architecture.mixers_of(layer) for x in mixer.linears]
    if architecture.has_gated_mlp(layer):
        linears += [f"{names.mlp}.{x}" for x in names.linears]
    for path in linears:
        kind = type(layer.get_submodule(path))
        if kind is not nn.Linear:  # its module, too: adapter libraries have a Linear of their own
            return f"{path} is a {kind.__module__}.{kind.__name__}, expected a plain Linear"
    for path, module in layer.named_modules():
        if path and hooks_of(module):
            return f"{path} has forward hooks, which a fused layer would not call"
        if path and own_forward(module) is not None and not is_packed(module):
            return f"{path} has a forward of its own"
    used = [layer.get_submodule(path) for path in linears]
    used += [module for module in layer.modules() if type(module) is nn.Conv1d]  # no cast ahead of its op
    used = used or [getattr(layer, name) for name in names.norms]
    weights = [p for module in used for p in module.parameters(recurse=False)]
    if any(type(p.data) is not Tensor for p in weights):
        return "its weights are of a tensor subclass (quantised or sharded)"
    if len({(p.dtype, p.device) for p in weights}) != 1:
        return "its weights differ in dtype or device"
    if weights[0].is_meta or weights[0].dtype not in _DTYPES:
        return f"its weights are {weights[0].dtype} on {weights[0].device}, which the ops do not take"
    norms = [module for module in layer.modules() if type(module).__name__ == f"{architecture.family}RMSNorm"]
    if any(norm.weight.dtype not in (weights[0].dtype, torch.float32) for norm in norms):
        return "its norms' weights have another dtype than its linear layers'"
    return None


def why_not(layer: Any, name: str) -> str | None:
    """Why pass ``name`` does not apply to a known ``layer``."""
    architecture = ARCHITECTURES[type(layer).__name__]
    mlp, names = architecture.mlp_of(layer), architecture.names
    if name == "qkv":
        paths = [f"{mixer.name}.{each}" for mixer in architecture.mixers_of(layer) for each in mixer.inputs]
        if len({layer.get_submodule(path).bias is None for path in paths}) > 1:
            return f"only some of {', '.join(path.split('.', 1)[1] for path in paths)} have a bias"
    if name == "gate_up":
        if not architecture.gated_mlp:
            return "its MLP has no gate"
        if activation_of(layer) is None:
            kind = type(getattr(mlp, architecture.names.activation)).__name__
            return f"its activation {kind} is none of silu, gelu_tanh, gelu"
        if len({getattr(mlp, each).bias is None for each in architecture.names.linears[:-1]}) > 1:
            return "only one of gate and up has a bias"
    if name == "experts":
        if architecture.beside_of(layer) is not None or names.post_norms or architecture.residual_scale:
            return "its mixture of experts stands next to an MLP, or is scaled or normed behind"
        return why_not_experts(mlp, architecture.family)
    attention = getattr(layer, names.attention, None)
    if name == "rope":
        theirs = [each for each, of in rotations_beside(type(attention)).items() if is_foreign(of)]
        if theirs:
            return f"its {theirs[0]} is another library's"
    if name == "rope" and architecture.head_norms_of(attention):
        q_norm, k_norm = (getattr(attention, each) for each in names.head_norms)
        if q_norm.weight.dtype != k_norm.weight.dtype:
            return "q_norm and k_norm differ in dtype"
    return None


def rotary_dim(attn: Any) -> int:
    """Numbers of a head that are rotated."""
    if hasattr(attn, "qk_rope_head_dim"):
        return int(attn.qk_rope_head_dim)
    parameters = getattr(attn.config, "rope_parameters", None) or {}
    return int(attn.head_dim * parameters.get("partial_rotary_factor", 1.0))


def why_no_table(rotary: Any, layer_type: str | None) -> str | None:
    """Why the rotation of ``rotary_emb`` can't come from one table."""
    kind = rotary.rope_type[layer_type] if isinstance(rotary.rope_type, dict) else rotary.rope_type
    if any(word in kind for word in LENGTH_DEPENDENT):
        return f"its rotation ({kind}) depends on the length of the text, so no table holds it"
    return None
