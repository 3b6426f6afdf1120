"""Switching a model to paged attention and back.

    with torchpaged.hf.paged(model):
        cache = torchpaged.hf.PagedCache(model.config, max_batch_size=4, max_seq_len=512)
        out = model.generate(**inputs, past_key_values=cache)

For most models that is ``model.set_attn_implementation("torchpaged")`` and the name before; those whose
attention modules ignore the interface and are known to `torchpaged.hf.models` get their modules'
functions replaced, too.
"""

import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.attached import (
    ATTACHED,
    PAGED,
    give_functions,
    give_traceable,
    is_held,
    replace_attention,
    require_ours,
    take_out,
)
from torchpaged.hf.attention import NAME
from torchpaged.hf.families import family_of
from torchpaged.hf.model_classes import unwrapped, uses_attention_interface
from torchpaged.hf.support import lacks_causal_mask, require_supported

_BEFORE = "_torchpaged_before"
_ATTACHED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
_PAGED: "weakref.WeakKeyDictionary[PreTrainedModel, _Before]" = weakref.WeakKeyDictionary()


def _configs(model: PreTrainedModel) -> list[Any]:
    """The configs of the model and of its parts, each once."""
    found = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    waiting = list(found.values())
    while waiting:
        config = waiting.pop()
        parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
        new = [part for part in parts if part is not None and id(part) not in found]
        found.update((id(part), part) for part in new)
        waiting += new
    return list(found.values())


def _set(implementations: Iterable[tuple[Any, str]]) -> None:
    """Of each config alone: the setter goes on to its parts."""
    for config, implementation in implementations:
        config._attn_implementation_internal = implementation


class _Before:
    """What a model was before it was paged, for the last of the objects that page it to give back. One
    that is dropped without doing so counts no more; what it found is here for the next one."""

    def __init__(self) -> None:
        self.holders: weakref.WeakSet[Settings] = weakref.WeakSet()
        self.implementations: dict[int, tuple[Any, str]] = {}  # each config, by its id, and what it had
        self.training: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the model may be one of them


class Settings:
    """What paging a model sets: the attention implementations of all its parts, eval mode, the forwards of
    mixers that keep states, and of modules whose own break a trace. Of several of one model the last gives
    back what was before the first, or what was set since; a config that another model has, too,
    stays as that one needs it.

    Args:
        model: the model, as it is before.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, before = model, _PAGED.setdefault(model, _Before())
        self._before = before
        before.holders.add(self)
        attached = {id(config): name for config, name in getattr(model, _BEFORE, ())}
        known = {key: pair[1] for other in _PAGED.values() for key, pair in other.implementations.items()}
        for config in _configs(model):
            name = attached.get(id(config), config._attn_implementation)
            name = known.get(id(config), name) if name == NAME else name
            if name != NAME or id(config) not in before.implementations:
                before.implementations[id(config)] = config, name
        before.training.update(module for module in model.modules() if module.training)
        give_traceable(model)

    def give_back(self) -> None:
        """Set what was before, or leave that to another object that pages the model; an implementation that
        was chosen since stays. A model that was attached meanwhile stays so, and `detach` sets what was
        before this."""
        before = self._before
        before.holders.discard(self)
        if before.holders or _PAGED.get(self._model) is not before:
            return
        del _PAGED[self._model]
        for module in before.training:
            module.training = True
        others = [model for model, other in _PAGED.items() if other.holders]
        take_out(self._model, PAGED, but={module for other in others for module in other.modules()})
        if hasattr(self._model, _BEFORE):
            pairs = getattr(self._model, _BEFORE)
            pairs = [before.implementations.get(id(config), (config, name)) for config, name in pairs]
            setattr(self._model, _BEFORE, pairs)
            return
        held = {key for other in _PAGED.values() if other.holders for key in other.implementations}
        pairs = [pair for key, pair in before.implementations.items() if key not in held]
        _set([pair for pair in pairs if pair[0]._attn_implementation == NAME])


def is_attached(model: PreTrainedModel) -> bool:
    """Whether `attach` has changed it, and `detach` has not changed it back."""
    return hasattr(model, _BEFORE)


def _reach_copies(model: PreTrainedModel) -> None:
    """Switch parts that have a copy of the model's config, as T5's stacks: transformers 5.17 takes them for
    the model itself, and passes them by."""
    for part in model.modules():
        if (
            isinstance(part, PreTrainedModel)
            and part.config is not model.config
            and type(part.config) is type(model.config)
            and part.config._attn_implementation != NAME
            and uses_attention_interface(type(part))
        ):
            part.set_attn_implementation(NAME)


def _say_if_made_causal(model: PreTrainedModel) -> None:
    """What it gives is other than the same transformers gives without us, and must not be so unsaid."""
    if lacks_causal_mask(model):
        warnings.warn(
            f"{type(model).__name__} of transformers {transformers.__version__} makes no causal mask: its "
            "prompts see tokens behind their own. Attached, it is masked causally, as other versions of "
            "transformers do",
            stacklevel=3,
        )


def _before_of_others(model: PreTrainedModel) -> dict[int, str]:
    """Of each config that other attached models have, too, by its id: the implementation before them all."""
    others = [other for other in _ATTACHED if other is not model and hasattr(other, _BEFORE)]
    return {id(config): name for other in others for config, name in getattr(other, _BEFORE)}


def attach(model: PreTrainedModel) -> PreTrainedModel:
    """Make ``model`` attend through torchpaged, until `detach`.

    Args:
        model: a model of transformers, in any attention implementation; or a ``PeftModel`` of one.

    Returns:
        The model itself.

    Raises:
        ArgumentError: it is no model of transformers, or is attached already, or a part of it is, or it is a
            part of one that is.
        UnsupportedModelError: its attention can't be paged; nothing was changed.
    """
    given, model = model, unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(
            "model",
            "a model of transformers",
            repr(model) if isinstance(model, str) else type(model).__name__,
            "load one with from_pretrained(...); modules of your own take torchpaged.PagedAttention",
        )
    if hasattr(model, _BEFORE):
        raise ArgumentError(
            "model", "a model that is not attached", "one that is", "call torchpaged.hf.detach(model) first"
        )
    if any(hasattr(part, _BEFORE) or is_held(part, ATTACHED) for part in model.modules()):
        raise ArgumentError(
            "model",
            "a model no part of which is attached, and no part of an attached one",
            f"{type(model).__name__}, with modules that attach() has changed",
            "call torchpaged.hf.detach on what was attached, and attach the whole",
        )
    family = family_of(model.config.model_type)
    own = not uses_attention_interface(type(model)) and family.own_attention
    if own:
        family.require_expressible(model.config)
    else:
        require_supported(model)
    known = _before_of_others(model)
    before = [(config, known.get(id(config), config._attn_implementation)) for config in _configs(model)]
    setattr(model, _BEFORE, before)
    _ATTACHED.add(model)
    try:
        _switch(model, own)
    except BaseException:
        detach(model)
        raise
    return given


def _switch(model: PreTrainedModel, own: bool) -> None:
    """Set the implementation, and give modules their functions; ``own``: their attention, too."""
    if own:
        if not replace_attention(model):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no attention modules that torchpaged knows (built with a flash "
                "implementation?); load it with attn_implementation='eager'"
            )
        # What set_attn_implementation sets, which leaves these models alone. Not public;
        # tests/hf/test_switch.py notices if it goes.
        model.config._attn_implementation = NAME
        _say_if_made_causal(model)
    else:
        model.set_attn_implementation(NAME)
        _reach_copies(model)
        give_functions(model)


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`: the attention implementations of all parts, and the modules' own functions. A config
    that another attached model has, too, stays as that one needs it, until it is detached.

    Raises:
        ArgumentError: the model is not attached, or something was put over one of its functions since;
            nothing was changed.
    """
    model = unwrapped(model)
    if not hasattr(model, _BEFORE):
        raise ArgumentError("model", "a model that attach() was called on", "one that it was not called on")
    require_ours(model)
    shared = _before_of_others(model)
    _set([pair for pair in getattr(model, _BEFORE) if id(pair[0]) not in shared])
    take_out(model)
    delattr(model, _BEFORE)
    _ATTACHED.discard(model)


@contextmanager
def paged(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """`attach` on entry, `detach` on exit, whatever happened in between.

    Args:
        model: a model of transformers.

    Yields:
        The model.

    Raises:
        ArgumentError, UnsupportedModelError: as `attach`.
    """
    attach(model)
    try:
        yield model
    finally:
        detach(model)
