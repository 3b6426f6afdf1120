"""The specification of latent attention in plain torch: `paged_attention`'s, with one kv head, and values
that are the first columns of the keys.

Source: DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434), section 2.1 and appendix C: a query's product with an
up-projected key is the product of the query, multiplied by that projection, with the latent; and the weighted
sum of up-projected values is the projection of the weighted sum of latents.
"""

import torch
from torch import Tensor

from torchpaged.custom_ops.mla.call import LatentCall, LatentWriteCall
from torchpaged.custom_ops.mla.check import (
    as_keys_and_values,
    check_mla_attention,
    check_rope_write_latent,
    check_up_project_values,
    check_write_latent,
)
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, store
from torchpaged.custom_ops.mla.selection import attend_densely
from torchpaged.custom_ops.plain_torch import exact_dtype


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


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, rotation: str) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of ``x [..., rope]`` by ``cos, sin [..., rope // 2]``."""
    x1, x2 = x.chunk(2, dim=-1) if rotation == "halves" else (x[..., ::2], x[..., 1::2])
    turned = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    return torch.stack(turned, dim=-1).flatten(-2) if rotation == "pairs" else torch.cat(turned, dim=-1)


def rope_write_latent(call: LatentWriteCall) -> None:
    """Absorb and rotate q into ``q_out``; norm the latents, rotate their keys and store both. Each number is
    rounded once, at the end; RMSNorm is arXiv:1910.07467's."""
    check_rope_write_latent(call)
    dtype = exact_dtype(call.q.dtype)
    q, latent, key, up_keys = (x.detach().to(dtype) for x in (call.q, call.kv_c, call.k_pe, call.up_keys))
    cos, sin = call.cos_sin[call.positions].to(dtype).chunk(2, dim=-1)
    nope = up_keys.shape[1]
    absorbed = torch.einsum("thn,hnr->thr", q[..., :nope], up_keys)
    turned = _rotate(q[..., nope:], cos[:, None], sin[:, None], call.rotation)
    call.q_out.copy_(torch.cat((absorbed, turned), dim=-1))
    if call.kv_norm is not None:
        latent = latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + call.norm_eps)
        latent = latent * call.kv_norm.detach().to(dtype)
    key = _rotate(key, cos, sin, call.rotation)
    if call.kv_cache.dtype == ROW_DTYPE:
        store(latent, key, call.kv_cache, call.slot_mapping)
        return
    written = call.slot_mapping >= 0
    slots, block_size = call.slot_mapping[written], call.kv_cache.shape[1]
    rows = torch.cat((latent, key), dim=-1)[written].to(call.kv_cache.dtype)
    call.kv_cache[slots // block_size, slots % block_size, 0] = rows


def up_project_values(latents: Tensor, up_values: Tensor, out: Tensor) -> None:
    """The sums of products, accumulated as torch's product of matrices does."""
    check_up_project_values(latents, up_values, out)
    out.copy_(torch.einsum("thr,hvr->thv", latents.detach(), up_values.detach()))
