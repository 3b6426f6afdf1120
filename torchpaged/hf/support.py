"""Facts about a model: whether it can run through the attention interface (and the refusal of those that can't), and whether it is fused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from torchpaged.custom_ops.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torchpaged.hf.fusion_report import FusionReport

_REASON = (
    "its attention layers do not call transformers' attention interface (ALL_ATTENTION_FUNCTIONS), so that no attention "
    "implementation can be plugged in; use a model that does, or torchpaged.PagedAttention in a model of your own"
)


def uses_attention_interface(model_class: type[PreTrainedModel]) -> bool:
    """Whether a model class calls the attention interface.

    transformers tells it only through the private ``_can_set_attn_implementation``; ``set_attn_implementation`` asks the same
    method but merely warns. ``tests/hf/test_refusals.py`` notices if it changes.
    """
    return bool(model_class._can_set_attn_implementation())


def require_supported(model: PreTrainedModel) -> None:
    """Refuse a model that would ignore the attention implementation.

    Raises:
        UnsupportedModelError: with the model's class and the reason.
    """
    if not uses_attention_interface(type(model)):
        raise UnsupportedModelError(f"{type(model).__name__} cannot run through torchpaged: {_REASON}")


def require_supported_config(config: Any) -> None:
    """The same from a config alone, where transformers knows the causal LM that goes with it."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if isinstance(model_class, type) and not uses_attention_interface(model_class):
        raise UnsupportedModelError(f"{model_class.__name__} cannot run through torchpaged: {_REASON}")


def fusion_of(model: PreTrainedModel) -> FusionReport | None:
    """The report of the `fuse` that ``model`` is under; None if it is not fused."""
    fusion: Any = getattr(model.get_decoder(), "_torchpaged_fusion", None)
    return None if fusion is None else fusion.report
