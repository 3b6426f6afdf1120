"""What `flash_attn_with_kvcache` asks of its arguments beyond what the ops ask of theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_dims, check_dtype, check_tensors, is_int, reads_values
from torchpaged.custom_ops.errors import ArgumentError


def check_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    max_seqlen_q: int | None,
    rotary_seqlens: Tensor | None,
) -> None:
    """Shapes, dtypes and values that only this door knows; raises `ArgumentError`."""
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    check_dims("k_cache", k_cache, None, None, None, None)
    check_dims("v_cache", v_cache, None, None, None, None)
    if cu_seqlens_q is None:
        check_dims("q", q, None, None, None, None)
        num_reqs = q.shape[0]
        if max_seqlen_q is not None and max_seqlen_q < q.shape[1]:
            raise ArgumentError(
                "max_seqlen_q", f"None or at least seqlen_q ({q.shape[1]})", repr(max_seqlen_q)
            )
    else:
        check_tensors(cu_seqlens_q=cu_seqlens_q)
        check_dims("q", q, None, None, None)
        check_dims("cu_seqlens_q", cu_seqlens_q, None)
        check_dtype("cu_seqlens_q", cu_seqlens_q, torch.int32)
        num_reqs = cu_seqlens_q.shape[0] - 1
        if not is_int(max_seqlen_q):
            raise ArgumentError(
                "max_seqlen_q", "an int with cu_seqlens_q, an upper bound of the lengths", repr(max_seqlen_q)
            )
    for name, tensor in (
        ("cache_batch_idx", cache_batch_idx),
        ("rotary_seqlens", rotary_seqlens),
        ("cache_seqlens", cache_seqlens),
    ):
        if isinstance(tensor, Tensor):
            check_dims(name, tensor, num_reqs)
            check_dtype(name, tensor, torch.int32)
    if (
        not isinstance(cache_seqlens, Tensor)
        and cache_seqlens is not None
        and (not is_int(cache_seqlens) or cache_seqlens < 0)
    ):
        raise ArgumentError("cache_seqlens", "None, an int of at least 0 or a tensor", repr(cache_seqlens))
    if table is not None and cache_batch_idx is not None:
        raise ArgumentError("cache_batch_idx", "None beside page_table, which has a row per request", "both")
    if cache_batch_idx is not None:
        check_tensors(cache_batch_idx=cache_batch_idx)
    if table is None and cache_batch_idx is not None and num_reqs and reads_values(q.device):
        low, high = (int(x) for x in torch.aminmax(cache_batch_idx))
        if low < 0 or high >= k_cache.shape[0]:
            raise ArgumentError(
                "cache_batch_idx", f"rows in [0, {k_cache.shape[0]})", f"values in [{low}, {high}]"
            )
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise ArgumentError(
            "rotary_cos, rotary_sin", "both or neither, and with k and v only", "one of them, or no k"
        )
    if rotary_seqlens is not None and rotary_cos is None:
        raise ArgumentError("rotary_seqlens", "None without rotary_cos", "a tensor")
    if cu_seqlens_k_new is not None and k is None:
        raise ArgumentError("cu_seqlens_k_new", "None without k and v", "a tensor")
    if (k is None) != (v is None):
        raise ArgumentError("k, v", "both or neither", f"k {'None' if k is None else 'given'}")
    if k is not None and v is not None:
        _check_new(k, v, k_cache, v_cache, cache_seqlens, table, num_reqs, cu_seqlens_k_new)


def _check_new(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    table: Tensor | None,
    num_reqs: int,
    cu_seqlens_k_new: Tensor | None,
) -> None:
    if cache_seqlens is None:
        raise ArgumentError(
            "cache_seqlens", "the tokens that are in the cache, since new ones are stored", "None"
        )
    heads = k_cache.shape[2]
    if cu_seqlens_k_new is None:
        check_dims("k", k, num_reqs, None, heads, k_cache.shape[3])
        check_dims("v", v, num_reqs, k.shape[1], heads, v_cache.shape[3])
        most: Any = k.shape[1]
    else:
        check_dims("k", k, None, heads, k_cache.shape[3])
        check_dims("v", v, k.shape[0], heads, v_cache.shape[3])
        check_dims("cu_seqlens_k_new", cu_seqlens_k_new, num_reqs + 1)
        check_dtype("cu_seqlens_k_new", cu_seqlens_k_new, torch.int32)
        most = cu_seqlens_k_new.diff() if reads_values(k.device) else 0
    if num_reqs and reads_values(k.device):
        width = 1 if table is None else table.shape[1]
        longest = int(torch.as_tensor(cache_seqlens + most).max())
        if longest > width * k_cache.shape[1]:
            raise ArgumentError(
                "cache_seqlens",
                f"room for the new tokens in {width * k_cache.shape[1]} of each request",
                str(longest),
            )
