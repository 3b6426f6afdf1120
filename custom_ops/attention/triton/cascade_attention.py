"""cascade_attention of the ``triton`` backend: two calls of its attention, the prefixes' without sinks, and
its merge (arXiv:2402.05099)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.check import check_cascade_attention


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
    """Launch; arguments as in ``custom_ops/attention/schema.py``."""
    own, prefixes = (
        (block_table, seq_lens, query_start_loc),
        (prefix_block_table, prefix_lens, prefix_query_start_loc),
    )
    check_cascade_attention(q, k_cache, v_cache, *own, *prefixes, order, inverse, out, lse, **options)
    ops = torch.ops.torchpaged
    handles = ops.paged_attention.triton, ops.merge_attn_states.triton
    compose(*handles, q, (k_cache, v_cache), own, prefixes, (order, inverse), out, lse, **options)


def compose(
    attend: Any,
    merge: Any,
    q: Tensor,
    pools: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor, Tensor],
    prefixes: tuple[Tensor, Tensor, Tensor],
    places: tuple[Tensor, Tensor],
    out: Tensor,
    lse: Tensor | None,
    *,
    max_query_len: int,
    sinks: Tensor | None = None,
    semaphore: Tensor | None = None,
    **options: Any,
) -> None:
    """Into ``out`` and ``lse``, on checked arguments.

    Args:
        attend, merge: handles of one backend's ops.
        pools: ``(k_cache, v_cache)``.
        own: block table, lengths and query starts of the requests.
        prefixes: the same of the groups.
        places: ``(order, inverse)``.
        semaphore: of the requests' call. The prefixes' makes one of its own: there may be more groups than
            requests, with one number each.
        options: of both calls.
    """
    order, inverse = places

    def states() -> tuple[Tensor, Tensor]:
        return torch.empty_like(out), torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)

    shared, rest = states(), states()
    longest = max(q.shape[0], 1)
    # all of a prefix lies before all queries
    attend(q[order], *pools, *prefixes, *shared, max_query_len=longest, causal=False, **options)
    own_options = {"max_query_len": max_query_len, "sinks": sinks, "semaphore": semaphore}
    attend(q, *pools, *own, *rest, **own_options, **options)
    merge(shared[0][inverse], shared[1][inverse], *rest, out, lse)
