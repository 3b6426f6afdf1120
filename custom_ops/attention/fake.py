"""Fake kernels of attention: what ``torch.compile`` runs in place of the ops, to refuse what can't fit."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.cascade_call import CascadeCall
from torchpaged.custom_ops.batch_values import expect_batch
from torchpaged.custom_ops.facts import expect, expect_dims, expect_dtype
from torchpaged.custom_ops.pools import FLOATS, expect_pools


def _paged_attention(call: AttentionCall) -> None:
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out = call[:7]
    expect_batch(q, out, block_table, seq_lens, query_start_loc)
    expect_pools(k_cache, v_cache)
    if call.output_scale is not None:
        expect_dtype(torch.float8_e4m3fn, out=out)
    elif q.dtype != torch.float8_e4m3fn:
        expect_dtype(q.dtype, out=out)
    else:
        expect(out.dtype in FLOATS, f"out: expected 16, 32 or 64 bits, got {out.dtype}")
    if q.dtype == torch.float8_e4m3fn:
        expect_dtype(q.dtype, k_cache=k_cache)
    dim = k_cache.shape[3]
    expect(q.shape[2] == dim, f"q: expected head_dim {dim}, got {q.shape[2]}")
    _expect_per_token(call.per_token, q)


def _cascade_attention(call: CascadeCall) -> None:
    own = call.own
    shared = call.prefixes(own.q, own.out, own.lse)._replace(output_scale=own.output_scale)
    for batch in (own, shared):
        _paged_attention(batch)
    _expect_per_token(call.per_token, own.q)


def _expect_per_token(tensors: dict[str, Tensor], q: Tensor) -> None:
    expect_dtype(torch.int64, **tensors)
    expect_dims(1, **tensors)
    for name, x in tensors.items():
        expect(x.shape[0] == q.shape[0], f"{name}: expected a number for each row of q")


FAKES: dict[str, Callable[..., None]] = {
    "paged_attention": _paged_attention,
    "cascade_attention": _cascade_attention,
}
