"""What several of the functions make of their arguments."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor


def given(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Those that are not None."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def traced_sizes(x: Tensor, k_cache: Tensor, v: Tensor) -> tuple[Any, ...]:
    """In a trace, the first fields of `TracedAttention` for queries like ``x``, or for the keys ``x`` that
    are written, and values like ``v``; sizes are made constants."""
    sizes = (x.shape[1], k_cache.shape[2], x.shape[2], v.shape[-1], k_cache.shape[1])
    return (x.dtype, k_cache.dtype, *(operator.index(size) for size in sizes))
