"""What `flash_attn_with_kvcache` asks of its arguments beyond what the ops ask of theirs."""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.custom_ops.batch_values import check_starts
from torchpaged.custom_ops.checks import (
    check_device,
    check_dims,
    check_dtype,
    check_tensors,
    is_int,
    reads_values,
)
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.functional.arguments import given


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
    tensors = {
        **given(k=k, v=v, page_table=table, cache_batch_idx=cache_batch_idx, rotary_seqlens=rotary_seqlens),
        **given(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new),
        **({"cache_seqlens": cache_seqlens} if isinstance(cache_seqlens, Tensor) else {}),
    }
    check_tensors(**tensors)
    check_device(q.device, k_cache=k_cache, v_cache=v_cache, **tensors)
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
        check_dims("q", q, None, None, None)
        check_dims("cu_seqlens_q", cu_seqlens_q, None)
        check_dtype("cu_seqlens_q", cu_seqlens_q, torch.int32)
        num_reqs = cu_seqlens_q.shape[0] - 1
        if max_seqlen_q is None or not is_int(max_seqlen_q) or max_seqlen_q < 0:
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
    if rotary_seqlens is not None and num_reqs and reads_values(q.device) and int(rotary_seqlens.min()) < 0:
        raise ArgumentError("rotary_seqlens", "positions of at least 0", str(rotary_seqlens.tolist()[:64]))
    if table is not None and cache_batch_idx is not None:
        raise ArgumentError("cache_batch_idx", "None with page_table, which has a row per request", "both")
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
    num_new: int | Tensor = 0
    if k is not None and v is not None:
        if cache_seqlens is None:
            raise ArgumentError(
                "cache_seqlens", "the tokens that are in the cache, since new ones are stored", "None"
            )
        num_new = _num_new(k, v, k_cache, v_cache, num_reqs, cu_seqlens_k_new)
    _check_lens(cache_seqlens, num_new, k_cache.shape[1] * (1 if table is None else table.shape[1]))


def _num_new(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, num_reqs: int, cu_seqlens_k_new: Tensor | None
) -> int | Tensor:
    """The new tokens of each request, or of all."""
    heads = k_cache.shape[2]
    if cu_seqlens_k_new is None:
        check_dims("k", k, num_reqs, None, heads, k_cache.shape[3])
        check_dims("v", v, num_reqs, k.shape[1], heads, v_cache.shape[3])
        return k.shape[1]
    check_dims("k", k, None, heads, k_cache.shape[3])
    check_dims("v", v, k.shape[0], heads, v_cache.shape[3])
    check_dims("cu_seqlens_k_new", cu_seqlens_k_new, num_reqs + 1)
    check_dtype("cu_seqlens_k_new", cu_seqlens_k_new, torch.int32)
    if reads_values(k.device):
        check_starts("cu_seqlens_k_new", cu_seqlens_k_new, k.shape[0])
    return cu_seqlens_k_new.diff()


def _check_lens(cache_seqlens: int | Tensor | None, num_new: int | Tensor, capacity: int) -> None:
    """Cached and new tokens have room; of those on a GPU only what the host knows."""
    if cache_seqlens is None:
        return
    if isinstance(num_new, Tensor) and not reads_values(num_new.device):
        num_new = 0
    if isinstance(cache_seqlens, Tensor):
        if not cache_seqlens.numel() or not reads_values(cache_seqlens.device):
            return
        least, most = int(cache_seqlens.min()), int((cache_seqlens.long() + num_new).max())
    elif is_int(cache_seqlens):
        least, most = cache_seqlens, cache_seqlens
        most += max(num_new.tolist(), default=0) if isinstance(num_new, Tensor) else num_new
    else:
        raise ArgumentError("cache_seqlens", "None, an int or a tensor", repr(cache_seqlens))
    if least < 0 or most > capacity:
        raise ArgumentError(
            "cache_seqlens",
            f"0 to {capacity} tokens of a request, the new ones included",
            str(least if least < 0 else most),
            "" if least < 0 else "give each request more room, or store fewer",
        )
