"""What transformers' classes tell of the models of a type."""

import functools
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_MAPPING,
    PreTrainedModel,
)

from torchpaged.hf.families import family_of

_MAPPINGS: tuple[Any, ...] = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_MAPPING,
)


def uses_attention_interface(model_class: type[PreTrainedModel]) -> bool:
    """Whether a model class calls the attention interface.

    transformers tells it only through the private ``_can_set_attn_implementation``;
    ``set_attn_implementation`` asks the same method but merely warns. ``tests/hf/test_refusals.py`` notices
    if it changes.
    """
    return bool(model_class._can_set_attn_implementation())


def class_of(config_class: type) -> type[PreTrainedModel] | None:
    """A model class that transformers knows for a config; None for a config from elsewhere. One modelling
    file holds them all."""
    for mapping in _MAPPINGS:
        found = mapping.get(config_class, None)
        found = found[0] if isinstance(found, (tuple, list)) else found
        if isinstance(found, type):
            return found
    return None


@functools.cache
def _told_by_class(model_type: str) -> tuple[bool, bool]:
    """`has_own_attention` and `needs_eager_mask`."""
    found = class_of(CONFIG_MAPPING[model_type]) if model_type in CONFIG_MAPPING else None
    own = found is not None and not uses_attention_interface(found)
    without_sdpa = found is not None and not getattr(found, "_supports_sdpa", False)
    return own, own or without_sdpa or family_of(model_type).adds_bias


@torch.compiler.assume_constant_result
def has_own_attention(model_type: str) -> bool:
    """Whether the models of a type ignore the attention interface, so that they add the mask to scores of
    their own."""
    return _told_by_class(model_type)[0]


@torch.compiler.assume_constant_result
def needs_eager_mask(model_type: str) -> bool:
    """Whether the models of a type are right only with the mask that eager attention adds to scores: one for
    every forward, in floating point.

    Those that ignore the attention interface, and those that do not claim SDPA: BigBird-Pegasus' decoder
    calls itself not causal and leaves causality to a mask that SDPA's mask function would leave out, and its
    encoder adds the mask to scores of its own. And those with a bias by positions, a mask in floating point
    anyway: UMT5's decoder calls itself not causal in transformers 5.17. ``_supports_sdpa`` is private;
    ``tests/hf/test_encoder_decoder.py`` notices if it changes.
    """
    return _told_by_class(model_type)[1]
