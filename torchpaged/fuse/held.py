"""The fusion of a model for the time of an engine, which may share the model with others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from torchpaged.fuse.passes import fuse, unfuse
from torchpaged.hf.wrapped import unwrapped


def fused_while_held(model: PreTrainedModel, fuses: bool) -> Callable[[], None]:
    """Hold the fusion of a model.

    Args:
        model: as of `fuse`.
        fuses: fuse it if it is not.

    Returns:
        What lets it go; the last who does unfuses a model that was fused here.

    Raises:
        ArgumentError, UnsupportedModelError: from `fuse`.
    """
    base: Any = unwrapped(model).get_decoder()
    if fuses and not hasattr(base, "_torchpaged_fusion"):
        fuse(model)
        base._torchpaged_fusion.holders = 0
    fusion: Any = getattr(base, "_torchpaged_fusion", None)
    if fusion is None or fusion.holders is None:
        return lambda: None
    fusion.holders += 1

    def let_go() -> None:
        fusion.holders = (fusion.holders or 0) - 1
        if fusion.holders == 0 and getattr(base, "_torchpaged_fusion", None) is fusion:
            unfuse(model)

    return let_go
