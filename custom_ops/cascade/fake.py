"""The fake kernel of ``cascade_attention``: it states what must fit and computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.fake import FAKES as ATTENTION


def _cascade_attention(
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
    **_: Any,
) -> None:
    own, prefixes = (
        (block_table, seq_lens, query_start_loc),
        (prefix_block_table, prefix_lens, prefix_query_start_loc),
    )
    for batch in (own, prefixes):
        ATTENTION["paged_attention"](q, k_cache, v_cache, *batch, out, lse)
    for name, rows in (("order", order), ("inverse", inverse)):
        torch._check(
            rows.dtype == torch.int64,
            lambda name=name, rows=rows: f"{name}: expected int64, got {rows.dtype}",
        )
        torch._check(rows.dim() == 1, lambda name=name: f"{name}: expected 1 dimension")
        torch._check(
            rows.shape[0] == q.shape[0], lambda name=name: f"{name}: expected a number for each row of q"
        )


FAKES: dict[str, Callable[..., None]] = {"cascade_attention": _cascade_attention}
