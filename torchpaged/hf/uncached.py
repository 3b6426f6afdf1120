"""Attention without a cache on our kernels: encoders, vision towers, decoders that keep nothing.

Keys and values are read where the model left them, as pools of blocks. Padding takes no part: a row is up to
three requests, the padding in front, the tokens and the padding behind, of which only the tokens have keys.
Nothing has a shape that depends on the lengths, so that one graph serves all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchpaged.compat.dense import packed_pools, rows_as_pools
from torchpaged.functional import paged_attention
from torchpaged.hf.known_models import ENCODERS
from torchpaged.hf.mask_rows import MaskRows, rows_of
from torchpaged.hf.pinned_batch import pin_batch


def attends_itself(module: nn.Module, rows: MaskRows) -> bool:
    """Whether the queries of ``module`` are the rows' own tokens, so that padding queries may be left out.

    Cross attention to as many keys as there are queries looks the same by its shapes: known are only models
    whose attention modules tell.
    """
    if rows.model_type not in ENCODERS:
        return False
    return not getattr(module, "is_decoder", ENCODERS[rows.model_type])


def takes(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
) -> bool:
    """Whether `attend` gives what SDPA gives for this call. Host facts only.

    Args:
        module: the attention layer.
        query: ``[batch, num_heads, query_len, head_dim]``.
        key, value: ``[batch, num_kv_heads, kv_len, head_dim(_v)]``.
        mask: as transformers' mask function made it, or None.
        causal: without a mask, whether keys behind a query are hidden.
        dropout: of the weights.
    """
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if needs_grad or (dropout and module.training) or query.dim() != 4 or key.shape[0] != query.shape[0]:
        return False
    if not query.is_floating_point() or query.dtype != key.dtype or key.dtype != value.dtype:
        return False
    query_len, kv_len = query.shape[2], key.shape[2]
    if mask is None:
        return query_len == kv_len if causal else query_len <= kv_len
    rows = rows_of(mask)
    if rows is None or rows.sizes != (query_len, kv_len) or mask.shape[0] != query.shape[0]:
        return False
    if query_len != kv_len and (rows.is_padded or rows.causal or rows.window != (-1, -1)):
        return False
    if rows.is_padded:
        return attends_itself(module, rows) and rows.are_spans()
    return bool(query_len <= kv_len)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, **options: Any
) -> Tensor:
    """Attention of every row over its own keys; queries that are padding give zeros.

    Args:
        query, key, value, mask, causal: as for `takes`, which said yes.
        options: ``scale``, ``logits_soft_cap``, ``sinks`` of `torchpaged.paged_attention`.

    Returns:
        ``[batch, query_len, num_heads, head_dim_v]``.
    """
    batch, num_heads, query_len, head_dim = query.shape
    rows = rows_of(mask)
    q = query.transpose(1, 2).reshape(batch * query_len, num_heads, head_dim)
    k, v, table = _pools(key.transpose(1, 2), value.transpose(1, 2), rows)
    if rows is None:
        described = pin_batch(*_requests(table, query_len, key.shape[2], rows))
    else:
        found = rows.batches.get(table.shape[1])
        described = found or pin_batch(*_requests(table, query_len, key.shape[2], rows))
        rows.batches[table.shape[1]] = described
    causal, window = (causal, (-1, -1)) if rows is None else (rows.causal, rows.window)
    out = paged_attention(
        q, k, v, *described, max_query_len=query_len, causal=causal, window_size=window, **options
    )
    result: Tensor = out.view(batch, query_len, num_heads, value.shape[-1])
    return result


def _pools(k: Tensor, v: Tensor, rows: MaskRows | None) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values ``[batch, kv_len, num_kv_heads, head_dim(_v)]`` as pools, and each row's blocks; of one
    token each where a row's keys may begin anywhere."""
    if rows is None or rows.starts is None or rows.all_at_zero:
        return rows_as_pools(k, v, None, k.shape[0])
    begin = torch.arange(k.shape[0], dtype=torch.int32, device=k.device) * k.shape[1] + rows.starts
    return packed_pools(k.flatten(0, 1), v.flatten(0, 1), begin, k.shape[1])


def _requests(table: Tensor, query_len: int, kv_len: int, rows: MaskRows | None) -> tuple[Tensor, Tensor, Tensor]:
    """Block table, lengths and query starts of the requests that the rows are."""
    batch, device = table.shape[0], table.device
    first = torch.arange(batch + 1, dtype=torch.int32, device=device) * query_len
    if rows is None or rows.lens is None or rows.starts is None:
        return table, torch.full((batch,), kv_len, dtype=torch.int32, device=device), first
    none = torch.zeros_like(rows.lens)
    begin, end = first[:-1] + rows.starts, first[:-1] + rows.starts + rows.lens
    lens = torch.stack((none, rows.lens, none), 1).flatten()
    ends = torch.stack((begin, end, first[1:]), 1).flatten()
    return table.repeat_interleave(3, 0), lens, torch.cat((first[:1], ends))
