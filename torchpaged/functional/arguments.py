"""What several of the functions make of their arguments."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_device, check_dtype
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.pools import FP8, check_scale


def given(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Those that are not None."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def traced_sizes(x: Tensor, k_cache: Tensor, v: Tensor, out: Tensor | None = None) -> tuple[Any, ...]:
    """In a trace, the first fields of `TracedAttention` for queries like ``x`` with results like ``out``, or
    for the keys ``x`` that are written, and values like ``v``; sizes are made constants."""
    sizes = (x.shape[1], k_cache.shape[2], x.shape[2], v.shape[-1], k_cache.shape[1])
    dtype = x.dtype if out is None else out.dtype
    return (dtype, k_cache.dtype, *(operator.index(size) for size in sizes))


def scale_of_products(
    q: Tensor, q_scale: Tensor | None, num_kv_heads: int, k_scale: Tensor | None
) -> Tensor | None:
    """What the ops take as ``k_scale``: with a scale of fp8 queries the product of both.

    Raises:
        ArgumentError: a scale of queries that are not fp8, or a scale whose shape, dtype, device or numbers
            ``k_scale`` can't have.
    """
    if q_scale is None:
        return k_scale
    if q.dtype not in FP8:
        raise ArgumentError(
            "q_scale", f"None for queries of {q.dtype}", "a tensor", "scales belong to fp8 queries"
        )
    scales = given(q_scale=q_scale, k_scale=k_scale)
    if torch.compiler.is_compiling():
        for name, scale in scales.items():  # a product might be of it nevertheless
            check_dtype(name, scale, torch.float32)
    else:
        check_device(q.device, **scales)
        for name, scale in scales.items():  # each by itself: their product may be good where they are not
            check_scale(name, scale, num_kv_heads)
    return q_scale if k_scale is None else q_scale * k_scale
