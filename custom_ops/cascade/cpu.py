"""Shared prefixes on a CPU, by the native kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.cascade.check import check_cascade_attention
from torchpaged.custom_ops.cascade.compose import compose
from torchpaged.custom_ops.checks import check_dtype

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    check_dtype("q", q, *_DTYPES)
    ops = torch.ops.torchpaged
    handles = ops.paged_attention.cpu, ops.merge_attn_states.cpu
    compose(*handles, q, (k_cache, v_cache), own, prefixes, (order, inverse), out, lse, **options)
