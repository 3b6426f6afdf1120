"""``cascade_attention`` of two calls of ``paged_attention``, the prefixes' without sinks, and
``merge_attn_states`` (arXiv:2402.05099)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
    **options: Any,
) -> None:
    """Into ``out`` and ``lse``, on checked arguments.

    Args:
        attend, merge: handles of one backend's ops.
        pools: ``(k_cache, v_cache)``.
        own: block table, lengths and query starts of the requests.
        prefixes: the same of the groups.
        places: ``(order, inverse)``.
        options: of both calls.
    """
    order, inverse = places

    def states() -> tuple[Tensor, Tensor]:
        return torch.empty_like(out), torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)

    shared, rest = states(), states()
    longest = max(q.shape[0], 1)
    # all of a prefix lies before all queries
    attend(q[order], *pools, *prefixes, *shared, max_query_len=longest, causal=False, **options)
    attend(q, *pools, *own, *rest, max_query_len=max_query_len, sinks=sinks, **options)
    merge(shared[0][inverse], shared[1][inverse], *rest, out, lse)
