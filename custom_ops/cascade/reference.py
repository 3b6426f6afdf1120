"""The specification of ``cascade_attention``: plain attention over each request's whole context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.cascade.check import check_cascade_attention, group_of_rows


def cascade_attention(
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
    **options: Any,
) -> None:
    """Arguments: ``custom_ops/cascade/schema.py``."""
    own, prefixes = (
        (block_table, seq_lens, query_start_loc),
        (prefix_block_table, prefix_lens, prefix_query_start_loc),
    )
    check_cascade_attention(q, k_cache, v_cache, *own, *prefixes, order, inverse, out, lse, **options)
    table, lens = _whole(own, prefixes, inverse, k_cache.shape[1])
    torch.ops.torchpaged.paged_attention.reference(
        q, k_cache, v_cache, table, lens, query_start_loc, out, lse, **options
    )


def _whole(
    own: tuple[Tensor, Tensor, Tensor], prefixes: tuple[Tensor, Tensor, Tensor], inverse: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Block table and lengths of the requests with their groups' blocks in front."""
    (table, lens, starts), (prefix_table, prefix_lens, prefix_starts) = own, prefixes
    num_groups, num_reqs = prefix_lens.shape[0], lens.shape[0]
    group = torch.cat([group_of_rows(inverse, prefix_starts), inverse.new_tensor([num_groups])])
    first = torch.where(starts.diff() > 0, starts[:-1].long(), group.shape[0] - 1)
    blocks = torch.cat([prefix_lens // size, prefix_lens.new_zeros(1)])[group[first]]
    shared = torch.cat([prefix_table, prefix_table.new_zeros(1, prefix_table.shape[1])])[group[first]]
    both = torch.cat([shared, table], 1)
    columns = torch.arange(both.shape[1], device=table.device).expand(num_reqs, -1)
    source = torch.where(
        columns < blocks[:, None], columns, columns - blocks[:, None] + prefix_table.shape[1]
    )
    return both.gather(1, source.clamp(max=max(both.shape[1] - 1, 0))), lens + blocks * size
