"""Keys and values without a block table, seen as pools of blocks: views of the caller's memory, never
copies."""

import math

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_dims
from torchpaged.custom_ops.errors import ArgumentError

#: A contiguous cache is cut into blocks of at most so many tokens.
MAX_BLOCK_SIZE = 128


def packed_pools(k: Tensor, v: Tensor, starts: Tensor, max_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed keys and values of requests, as pools of blocks of one token.

    Args:
        k: ``[total_k, num_kv_heads, head_dim]``.
        v: ``[total_k, num_kv_heads, head_dim_v]``.
        starts: ``[num_reqs]`` int32, where each request's keys begin.
        max_len: upper bound of the keys of a request; the width of the table.

    Returns:
        ``(k_cache, v_cache, block_table)``. The table's entries behind a request's last key name any token,
        and are never read.
    """
    columns = torch.arange(max(max_len, 1), dtype=torch.int32, device=k.device)
    table = (starts[:, None] + columns).clamp(max=k.shape[0] - 1)
    return k.unsqueeze(1), v.unsqueeze(1), table


def rows_as_pools(
    k_cache: Tensor, v_cache: Tensor, batch_idx: Tensor | None, num_reqs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A cache of one row per request, as pools.

    Args:
        k_cache: ``[batch_size_cache, seqlen_cache, num_kv_heads, head_dim]``.
        v_cache: ``[batch_size_cache, seqlen_cache, num_kv_heads, head_dim_v]``.
        batch_idx: ``[num_reqs]`` int32, the row of each request; None: the first rows, in order.
        num_reqs: requests of the call.

    Returns:
        ``(k_cache, v_cache, block_table)``.

    Raises:
        ArgumentError: fewer rows than requests, or rows that no view can cut into blocks of one size.
    """
    rows, length = k_cache.shape[:2]
    if not torch.compiler.is_compiling():
        check_dims("v_cache", v_cache, rows, length, k_cache.shape[2], None)
        if batch_idx is None and rows < num_reqs:
            raise ArgumentError(
                "k_cache",
                f"at least {num_reqs} rows, one per request",
                str(list(k_cache.shape)),
                "pass page_table or cache_batch_idx",
            )
    block_size = math.gcd(length, MAX_BLOCK_SIZE)
    if block_size < 16 or not (_is_flat(k_cache) and _is_flat(v_cache)):
        block_size = length  # a row is one block
    per_row = length // block_size
    first = (
        torch.arange(num_reqs, dtype=torch.int32, device=k_cache.device)
        if batch_idx is None
        else batch_idx.to(torch.int32)
    )
    table = first[:, None] * per_row + torch.arange(per_row, dtype=torch.int32, device=k_cache.device)
    if per_row == 1:
        return k_cache, v_cache, table
    k, v = (cache.unflatten(1, (per_row, block_size)).flatten(0, 1) for cache in (k_cache, v_cache))
    return k, v, table


def _is_flat(cache: Tensor) -> bool:
    """Whether the rows follow each other at the distance of their tokens, so that rows and blocks can be one
    dimension."""
    return cache.shape[0] == 1 or cache.stride(0) == cache.shape[1] * cache.stride(1)
