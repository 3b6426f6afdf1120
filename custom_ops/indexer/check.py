"""Argument checks of the indexer's ops, shared by the reference and the kernels."""

import torch
from torch import Tensor

from torchpaged.custom_ops.batch_values import check_batch, check_batch_values
from torchpaged.custom_ops.checks import (
    check_device,
    check_dims,
    check_dtype,
    check_last_dim,
    check_tensor,
    given,
    reads_values,
    shape_of,
)
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.indexer.call import IndexCall
from torchpaged.custom_ops.memory import check_apart
from torchpaged.custom_ops.pools import FLOATS
from torchpaged.custom_ops.slots import check_slots

_E4M3 = torch.float8_e4m3fn


def _check_pool(states: Tensor, name: str, k_cache: Tensor, k_scale: Tensor | None) -> None:
    """A pool of keys, for ``states`` of its dtype or, with scales, of another one."""
    check_dtype(name, states, *FLOATS)
    check_dims("k_cache", k_cache, None, None, 1, states.shape[-1])
    if min(k_cache.shape) < 1:
        raise ArgumentError("k_cache", "at least one block, token per block and column", shape_of(k_cache))
    check_dtype("k_cache", k_cache, states.dtype if k_scale is None else _E4M3)
    check_last_dim(k_cache=k_cache)
    if k_scale is not None:
        check_dims("k_scale", k_scale, k_cache.shape[0], k_cache.shape[1])
        check_dtype("k_scale", k_scale, torch.float32)


def check_write_index_keys(k: Tensor, k_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None) -> None:
    """Every argument of ``write_index_keys``; raises `ArgumentError` before anything is written."""
    check_dims("slot_mapping", slot_mapping, None)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_dims("k", k, slot_mapping.shape[0], None)
    _check_pool(k, "k", k_cache, k_scale)
    check_last_dim(k=k)
    check_device(k_cache.device, k=k, slot_mapping=slot_mapping, k_scale=k_scale)
    written = given(k_cache=k_cache, k_scale=k_scale)
    check_apart(written, {"k": k, "slot_mapping": slot_mapping}, "pass a copy: .clone()")
    if k_scale is not None:
        check_apart({"k_cache": k_cache}, {"k_scale": k_scale}, "allocate k_scale with torch.empty")
    check_slots(slot_mapping, k_cache)


def check_index_logits(call: IndexCall) -> None:
    """Every argument of ``index_logits``; raises `ArgumentError` before anything is written."""
    q, weights, k_cache, block_table, seq_lens, query_start_loc, logits = call[:7]
    check_dims("q", q, None, None, None)
    if not q.shape[1]:
        raise ArgumentError("q", "at least one head", shape_of(q))
    _check_pool(q, "q", k_cache, call.k_scale)
    check_tensor("weights", weights, q.shape[:2], torch.float32)
    batch = check_batch(block_table, seq_lens, query_start_loc, call.max_query_len)
    columns = block_table.shape[1] * k_cache.shape[1]
    check_tensor("logits", logits, (q.shape[0], columns), torch.float32)
    check_last_dim(q=q)
    check_device(k_cache.device, q=q, weights=weights, logits=logits, k_scale=call.k_scale, **batch)
    read = given(q=q, weights=weights, k_cache=k_cache, k_scale=call.k_scale)
    check_apart({"logits": logits}, read, "allocate logits with torch.empty")
    if reads_values(q.device):
        check_batch_values(q.shape[0], k_cache, block_table, seq_lens, query_start_loc, call.max_query_len)


def check_top_k_indices(logits: Tensor, indices: Tensor) -> None:
    """Every argument of ``top_k_indices``; raises `ArgumentError` before anything is written."""
    check_dims("logits", logits, None, None)
    check_dtype("logits", logits, torch.float32)
    check_dims("indices", indices, logits.shape[0], None)
    check_dtype("indices", indices, torch.int32)
    check_device(logits.device, indices=indices)
    check_apart({"indices": indices}, {"logits": logits}, "allocate indices with torch.empty")
