"""Fake kernels of attention: what ``torch.compile`` runs in place of the ops, to learn shapes and to refuse
what can't fit.

All ops return ``()``, so that there is nothing to compute. Sizes may be symbols without values:
``torch._check`` states facts, an ``if`` would need to decide them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.call import AttentionCall, CascadeCall
from torchpaged.custom_ops.batch_values import expect_batch
from torchpaged.custom_ops.early_launch import refuse_inductors_for
from torchpaged.custom_ops.pools import FLOATS, expect_pools


def _paged_attention(call: AttentionCall) -> None:
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out = call[:7]
    refuse_inductors_for(q)
    expect_batch(q, out, block_table, seq_lens, query_start_loc)
    expect_pools(k_cache, v_cache)
    if call.output_scale is not None:
        torch._check(
            out.dtype == torch.float8_e4m3fn, lambda: f"out: expected torch.float8_e4m3fn, got {out.dtype}"
        )
    elif q.dtype != torch.float8_e4m3fn:
        torch._check(q.dtype == out.dtype, lambda: f"out: expected {q.dtype}, got {out.dtype}")
    else:
        torch._check(out.dtype in FLOATS, lambda: f"out: expected 16, 32 or 64 bits, got {out.dtype}")
    if q.dtype == torch.float8_e4m3fn:
        torch._check(k_cache.dtype == q.dtype, lambda: f"k_cache: expected {q.dtype}, got {k_cache.dtype}")
    torch._check(
        q.shape[2] == k_cache.shape[3], lambda: f"q: expected head_dim {k_cache.shape[3]}, got {q.shape[2]}"
    )
    _expect_per_token(call.per_token, q)


def _cascade_attention(call: CascadeCall) -> None:
    own = call.own
    shared = call.prefixes(own.q, own.out, own.lse)._replace(output_scale=own.output_scale)
    for batch in (own, shared):
        _paged_attention(batch)
    _expect_per_token(call.per_token, own.q)


def _expect_per_token(tensors: dict[str, Tensor], q: Tensor) -> None:
    for name, x in tensors.items():
        torch._check(x.dtype == torch.int64, lambda name=name, x=x: f"{name}: expected int64, got {x.dtype}")
        torch._check(x.dim() == 1, lambda name=name, x=x: f"{name}: expected 1 dimension, got {x.dim()}")
        torch._check(
            x.shape[0] == q.shape[0], lambda name=name: f"{name}: expected a number for each row of q"
        )


FAKES: dict[str, Callable[..., None]] = {
    "paged_attention": _paged_attention,
    "cascade_attention": _cascade_attention,
}
