"""Argument checks of ``cascade_attention``, shared by the reference, the kernels and the public function."""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.check import check_paged_attention
from torchpaged.custom_ops.checks import check_device, check_dims, check_dtype, check_last_dim, reads_values
from torchpaged.custom_ops.errors import ArgumentError


def check_cascade_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    prefix_block_table: Tensor,
    prefix_lens: Tensor,
    prefix_query_start_loc: Tensor,
    order: Tensor,
    inverse: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    max_query_len: int,
    scale: float,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    semaphore: Tensor | None = None,
) -> None:
    """Every argument of ``cascade_attention``; raises `ArgumentError` before anything is written."""
    check_paged_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        lse,
        max_query_len=max_query_len,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        semaphore=semaphore,
    )
    groups = {
        "prefix_block_table": prefix_block_table,
        "prefix_lens": prefix_lens,
        "prefix_query_start_loc": prefix_query_start_loc,
    }
    check_dims("prefix_block_table", prefix_block_table, None, None)
    check_dims("prefix_lens", prefix_lens, prefix_block_table.shape[0])
    check_dims("prefix_query_start_loc", prefix_query_start_loc, prefix_block_table.shape[0] + 1)
    for name, tensor in groups.items():
        check_dtype(name, tensor, torch.int32)
    rows = {"order": order, "inverse": inverse}
    for name, tensor in rows.items():
        check_dims(name, tensor, q.shape[0])
        check_dtype(name, tensor, torch.int64)
    check_last_dim(**groups, **rows)
    check_device(q.device, **groups, **rows)
    if reads_values(q.device):
        _check_values(q, k_cache, groups, order, inverse, query_start_loc)


def _check_values(
    q: Tensor,
    k_cache: Tensor,
    groups: dict[str, Tensor],
    order: Tensor,
    inverse: Tensor,
    query_start_loc: Tensor,
) -> None:
    table, lens, starts = groups.values()
    num_blocks, block_size = k_cache.shape[:2]
    rows = torch.arange(q.shape[0], device=q.device)
    if not torch.equal(order.sort().values, rows):
        raise ArgumentError("order", f"each of {q.shape[0]} token rows once", str(order.tolist()[:64]))
    if not torch.equal(inverse[order], rows):
        raise ArgumentError("inverse", "the place of each row in order", str(inverse.tolist()[:64]))
    counts = starts.diff()
    if starts.numel() and (int(starts[0]) or bool((counts < 0).any()) or int(starts[-1]) > q.shape[0]):
        raise ArgumentError(
            "prefix_query_start_loc", f"rising from 0 to at most {q.shape[0]}", str(starts.tolist()[:64])
        )
    longest = table.shape[1] * block_size
    if bool(((lens < 0) | (lens % block_size != 0) | (lens > longest) | (counts > lens)).any()):
        raise ArgumentError(
            "prefix_lens",
            f"multiples of {block_size} up to {longest}, and no fewer than the tokens of the group",
            f"{lens.tolist()[:64]} with {counts.tolist()[:64]} tokens",
        )
    used = torch.arange(table.shape[1], device=q.device) * block_size < lens[:, None]
    if bool((((table < 0) | (table >= num_blocks)) & used).any()):
        raise ArgumentError("prefix_block_table", f"block ids in [0, {num_blocks})", "others")
    group = group_of_rows(inverse, starts)
    first = query_start_loc[:-1].long()
    request = torch.searchsorted(query_start_loc[1:].long(), rows, right=True)
    inside = request < first.shape[0]
    if bool((group[inside] != group[first[request[inside]]]).any()):
        raise ArgumentError(
            "order", "all token rows of a request in one group, or in none", "a request in two"
        )
    if bool((group[~inside] < starts.shape[0] - 1).any()):
        raise ArgumentError("order", "no rows of padding in a group", "some")


def group_of_rows(inverse: Tensor, prefix_query_start_loc: Tensor) -> Tensor:
    """``[T]`` int64: each token row's group; as many as there are groups: none."""
    return torch.searchsorted(prefix_query_start_loc[1:].long(), inverse, right=True)
