"""What transformers' classes, and wrappers around them, tell of models; and classes that they look up by
name."""

import functools
import importlib
from collections.abc import Callable
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

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.families import CLASS_TABLES, family_of

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
def _told_by_class(model_class: type[PreTrainedModel]) -> tuple[bool, bool]:
    """Whether it has attention of its own, and whether it claims SDPA."""
    return not uses_attention_interface(model_class), getattr(model_class, "_supports_sdpa", False)


def _told(model_type: str) -> tuple[bool, bool]:
    """`_told_by_class`; what most models are of a type that transformers does not know, or not yet."""
    found = class_of(CONFIG_MAPPING[model_type]) if model_type in CONFIG_MAPPING else None
    if found is None:
        return False, True
    return _told_by_class(found)  # type: ignore[arg-type]  # mypy: type[Any] is not Hashable


@torch.compiler.assume_constant_result
def has_own_attention(model_type: str) -> bool:
    """Whether the models of a type ignore the attention interface, so that they add the mask to scores of
    their own."""
    return _told(model_type)[0]


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
    own, claims_sdpa = _told(model_type)
    return own or not claims_sdpa or family_of(model_type).adds_bias


def _refusal(model: str, name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedModelError(
            f"{model} cannot be built with attn_implementation={name!r}: it has attention classes of its own "
            "by name, and none for it; build it with 'eager', and of a model of several parts call "
            "set_attn_implementation on its language model"
        )

    return refuse


def fill_class_tables(name: str) -> None:
    """Enter ``name`` into the tables of models that look their attention class up by the implementation's
    name; a model that this transformers lacks, or a table that went, is left alone.

    transformers accepts a registered name for any model, and these would raise a bare KeyError. Decoders
    whose own attention only needs a mask get their eager class; the rest says what to do.

    Called at the import of `torchpaged.hf`, which imports their modelling files: a tenth of what importing
    transformers takes. There is no later place. A table is read in a layer's constructor, before any
    attention or mask function runs; until then transformers only looks whether the name is a key of
    ``AttentionInterface``, which calls nothing of ours. What is left, wrapping ``PreTrainedModel``'s own
    methods or Python's import, would change models that never ask for this name. The tables are not public;
    ``tests/hf/test_class_tables.py`` notices one that changes, goes or comes.
    """
    for path, takes_eager in CLASS_TABLES.items():
        module, table = path.rsplit(".", 1)
        try:
            classes = getattr(importlib.import_module(f"transformers.models.{module}"), table, None)
        except ImportError:
            continue
        if classes is not None and name not in classes:
            classes[name] = classes["eager"] if takes_eager else _refusal(module.split(".")[0], name)


def unwrapped(model: Any) -> Any:
    """``model``, or if it is a ``PeftModel`` the transformers model in it: the adapters are in its modules,
    and whatever is active there runs. Known by the method ``get_base_model``; peft is not imported.

    Raises:
        UnsupportedModelError: its adapter is a learned prompt, which the wrapper alone puts in front of
            the inputs.
    """
    if isinstance(model, PreTrainedModel) or not callable(getattr(type(model), "get_base_model", None)):
        return model
    configs = getattr(model, "peft_config", {}).items()
    prompts = [name for name, config in configs if getattr(config, "is_prompt_learning", False)]
    if prompts:
        raise UnsupportedModelError(
            f"{type(model).__name__}: adapter {prompts[0]!r} is a learned prompt, which the wrapper puts in "
            "front of the inputs and torchpaged does not see; only adapters inside the modules (LoRA and its "
            "like) can be paged"
        )
    return model.get_base_model()


def without_wrapper(model: Any) -> Any:
    """`unwrapped`, for what calls the model in a ``PeftModel`` itself.

    Raises:
        UnsupportedModelError: as `unwrapped`; or an adapter is an activated LoRA, which begins in each row
            behind tokens that the wrapper alone looks for: the model in it runs as if there was no adapter.
    """
    inside = unwrapped(model)
    configs = () if inside is model else getattr(model, "peft_config", {}).items()
    for name, config in configs:
        if getattr(config, "alora_invocation_tokens", None) is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__}: adapter {name!r} is an activated LoRA (alora_invocation_tokens), "
                "whose first token in each row the wrapper looks for, and the engine would leave it out; "
                "call attach(model), and generate() with a PagedCache"
            )
    return inside
