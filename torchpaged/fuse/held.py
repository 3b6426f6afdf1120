"""The fusion of a model for the time of an engine, which may share the model with others."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from transformers import PreTrainedModel

from torchpaged.fuse.passes import fuse, unfuse
from torchpaged.hf.model_classes import unwrapped


class _Hold:
    """Of one engine, which alone keeps it alive: one that is dropped holds nothing any more."""


#: By fusions that were made here; a copy of a fused model stays fused.
_HOLDS: WeakKeyDictionary[Any, WeakSet[_Hold]] = WeakKeyDictionary()


def fused_while_held(model: PreTrainedModel, fuses: bool) -> Callable[[], None]:
    """Hold the fusion of a model.

    Args:
        model: as of `fuse`.
        fuses: fuse it if it is not.

    Returns:
        A function that lets it go; the last of these calls unfuses a model that was fused here. A function
        that is dropped uncalled counts no more, and leaves the model as it is.

    Raises:
        ArgumentError, UnsupportedModelError: from `fuse`.
    """
    base: Any = unwrapped(model).get_decoder()
    if fuses and not hasattr(base, "_torchpaged_fusion"):
        fuse(model)
        _HOLDS[base._torchpaged_fusion] = WeakSet()
    fusion: Any = getattr(base, "_torchpaged_fusion", None)
    holds = None if fusion is None else _HOLDS.get(fusion)
    if holds is None:
        return lambda: None
    hold = _Hold()
    holds.add(hold)

    def let_go() -> None:
        holds.discard(hold)
        if not holds and getattr(base, "_torchpaged_fusion", None) is fusion:
            unfuse(model)

    return let_go
