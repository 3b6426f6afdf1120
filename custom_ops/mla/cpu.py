"""Latent attention on a CPU, by the native kernels: those of ``paged_attention`` and ``write_kv`` take a pool
that serves keys and values, and pools that are columns of one, at any width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_dtype
from torchpaged.custom_ops.mla.check import as_keys_and_values, check_mla_attention, check_write_latent

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def mla_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    max_query_len: int,
    scale: float,
    causal: bool = True,
) -> None:
    """Arguments: ``custom_ops/mla/schema.py``."""
    options: dict[str, Any] = {"max_query_len": max_query_len, "scale": scale, "causal": causal}
    check_mla_attention(q, kv_cache, block_table, seq_lens, query_start_loc, out, lse, **options)
    check_dtype("q", q, *_DTYPES)
    values = kv_cache[..., : out.shape[2]]
    torch.ops.torchpaged.paged_attention.cpu(
        q, kv_cache, values, block_table, seq_lens, query_start_loc, out, lse, **options
    )


def write_latent(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Arguments: ``custom_ops/mla/schema.py``."""
    check_write_latent(kv_c, k_pe, kv_cache, slot_mapping)
    check_dtype("kv_c", kv_c, *_DTYPES)
    torch.ops.torchpaged.write_kv.cpu(*as_keys_and_values(kv_c, k_pe, kv_cache), slot_mapping)
