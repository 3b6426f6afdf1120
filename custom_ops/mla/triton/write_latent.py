"""write_latent: the kernel of ``write_kv``, with the two column ranges of the pool as its pools."""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.custom_ops.mla.check import as_keys_and_values, check_write_latent
from torchpaged.custom_ops.triton.launching import require_launchable


def write_latent(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Launch; arguments as in ``custom_ops/mla/schema.py``."""
    require_launchable(kv_c)
    check_write_latent(kv_c, k_pe, kv_cache, slot_mapping)
    torch.ops.torchpaged.write_kv.triton(*as_keys_and_values(kv_c, k_pe, kv_cache), slot_mapping)
