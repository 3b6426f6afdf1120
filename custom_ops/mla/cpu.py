"""Latent attention on a CPU, by the native kernels: those of ``paged_attention`` and ``write_kv`` take a pool
that serves keys and values, and pools that are columns of one, at any width."""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_dtype
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.check import as_keys_and_values, check_mla_attention, check_write_latent
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, store
from torchpaged.custom_ops.mla.selection import attend_densely

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def mla_attention(call: LatentCall) -> None:
    """Arguments: ``custom_ops/mla/schema.py``."""
    check_mla_attention(call)
    check_dtype("q", call.q, *_DTYPES)
    attend_densely(call, torch.ops.torchpaged.paged_attention.cpu)


def write_latent(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Arguments: ``custom_ops/mla/schema.py``."""
    check_write_latent(kv_c, k_pe, kv_cache, slot_mapping)
    check_dtype("kv_c", kv_c, *_DTYPES)
    if kv_cache.dtype == ROW_DTYPE:
        store(kv_c, k_pe, kv_cache, slot_mapping)
        return
    torch.ops.torchpaged.write_kv.cpu(*as_keys_and_values(kv_c, k_pe, kv_cache), slot_mapping)
