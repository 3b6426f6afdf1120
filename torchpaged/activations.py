"""Activations of transformers by the names that ops give them (`act_and_mul`, `linear`, `apply_experts`)."""

from typing import Any

from torch.nn import functional as F

#: transformers' classes. One of them with another way of computing it is refused.
_OF_CLASSES = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh", "GELUActivation": "gelu"}


def name_of_activation(act: Any) -> str | None:
    """The ops' name for an activation, a module or a function of torch; None: none of theirs."""
    if act is F.silu:
        return "silu"
    # "gelu_python": the same formula, but not torch's function
    if getattr(getattr(act, "act", None), "__self__", None) is act:
        return None
    return _OF_CLASSES.get(type(act).__name__)
