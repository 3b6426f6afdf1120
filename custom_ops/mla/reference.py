"""The specification of latent attention in plain torch: `paged_attention`'s, with one kv head, and values
that are the first columns of the keys.

Source: DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434), section 2.1 and appendix C: a query's product with an
up-projected key is the product of the query, multiplied by that projection, with the latent; and the weighted
sum of up-projected values is the projection of the weighted sum of latents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.check import as_keys_and_values, check_mla_attention, check_write_latent
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, store
from torchpaged.custom_ops.mla.selection import attend_densely


def mla_attention(call: LatentCall) -> None:
    """Arguments: ``custom_ops/mla/schema.py``."""
    check_mla_attention(call)
    attend_densely(call, torch.ops.torchpaged.paged_attention.reference)


def write_latent(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's latent and rotated key in its row of the pool; slot -1 skips."""
    check_write_latent(kv_c, k_pe, kv_cache, slot_mapping)
    if kv_cache.dtype == ROW_DTYPE:
        store(kv_c, k_pe, kv_cache, slot_mapping)
        return
    torch.ops.torchpaged.write_kv.reference(*as_keys_and_values(kv_c, k_pe, kv_cache), slot_mapping)
