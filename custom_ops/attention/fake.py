"""Fake kernels of attention: what ``torch.compile`` runs in place of the ops, to learn shapes and to refuse
what can't fit.

All ops return ``()``, so that there is nothing to compute. Sizes may be symbols without values:
``torch._check`` states facts, an ``if`` would need to decide them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchpaged.custom_ops.attention.call import AttentionCall, CascadeCall
from torchpaged.custom_ops.early_launch import refuse_inductors_for
from torchpaged.custom_ops.pools import FLOATS, expect_pools


def _paged_attention(call: AttentionCall) -> None:
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out = call[:7]
    refuse_inductors_for(q)
    torch._check(
        q.dim() == 3 and out.dim() == 3, lambda: f"q, out: expected 3 dimensions, got {q.dim()}, {out.dim()}"
    )
    expect_pools(k_cache, v_cache)
    if q.dtype != torch.float8_e4m3fn:
        torch._check(q.dtype == out.dtype, lambda: f"out: expected {q.dtype}, got {out.dtype}")
    else:
        torch._check(out.dtype in FLOATS, lambda: f"out: expected 16, 32 or 64 bits, got {out.dtype}")
        torch._check(k_cache.dtype == q.dtype, lambda: f"k_cache: expected {q.dtype}, got {k_cache.dtype}")
    torch._check(
        block_table.dim() == 2, lambda: f"block_table: expected 2 dimensions, got {block_table.dim()}"
    )
    for name, t in (
        ("block_table", block_table),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
    ):
        torch._check(t.dtype == torch.int32, lambda name=name, t=t: f"{name}: expected int32, got {t.dtype}")
    torch._check(
        q.shape[2] == k_cache.shape[3], lambda: f"q: expected head_dim {k_cache.shape[3]}, got {q.shape[2]}"
    )
    torch._check(q.shape[0] == out.shape[0], lambda: "out: expected as many rows as q")
    torch._check(
        block_table.shape[0] == seq_lens.shape[0], lambda: "seq_lens: expected one length per table row"
    )
    tree_mask = call.tree_mask
    if tree_mask is not None:
        torch._check(
            tree_mask.dtype == torch.int64, lambda: f"tree_mask: expected int64, got {tree_mask.dtype}"
        )
        torch._check(tree_mask.dim() == 1, lambda: f"tree_mask: expected 1 dimension, got {tree_mask.dim()}")
        torch._check(tree_mask.shape[0] == q.shape[0], lambda: "tree_mask: expected one word per query token")


def _cascade_attention(call: CascadeCall) -> None:
    own = call.own
    q = own.q
    for batch in (own, call.prefixes(q, own.out, own.lse)):
        _paged_attention(batch)
    for name, rows in (("order", call.order), ("inverse", call.inverse)):
        torch._check(
            rows.dtype == torch.int64,
            lambda name=name, rows=rows: f"{name}: expected int64, got {rows.dtype}",
        )
        torch._check(rows.dim() == 1, lambda name=name: f"{name}: expected 1 dimension")
        torch._check(
            rows.shape[0] == q.shape[0], lambda name=name: f"{name}: expected a number for each row of q"
        )


FAKES: dict[str, Callable[..., None]] = {
    "paged_attention": _paged_attention,
    "cascade_attention": _cascade_attention,
}
