"""The specification of the cache writes in plain torch.

Dimensions: T tokens, H heads, K kv heads, D head_dim. What is computed is so in float32, or float64 when the
inputs are float64.
"""

import torch
from torch import Tensor

from torchpaged.custom_ops.cache_write.call import RotatedWriteCall, WriteCall
from torchpaged.custom_ops.cache_write.check import check_rope_write_kv, check_write_kv
from torchpaged.custom_ops.plain_torch import exact_dtype
from torchpaged.custom_ops.pools import FP8


def _quantize(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """``x [T, K, D]`` in the cache's dtype; fp8 values are stored divided by their scale and saturated."""
    if dtype not in FP8:
        return x.to(dtype)
    x = x.float() if scale is None else x.float() / scale.view(1, -1, 1)
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def write_kv(call: WriteCall) -> None:
    """Store ``k``, ``v`` at their slots; slot -1 skips. Two tokens with one slot are refused where values are
    checked, else undefined.

    ``are_query_tokens`` says when others may start; it changes no result.
    """
    check_write_kv(call)
    _store(call)


def _store(call: WriteCall) -> None:
    k, v, k_cache, v_cache, slot_mapping, (k_scale, v_scale), _ = call
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    block, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
    k_cache[block, offset] = _quantize(k[keep], k_cache.dtype, k_scale)
    v_cache[block, offset] = _quantize(v[keep], v_cache.dtype, v_scale)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """RMSNorm over the last dimension (arXiv:1910.07467); the weight is ``offset + weight``."""
    if weight is None:
        return x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight.to(x.dtype))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of ``x [T, H, D]`` by ``cos, sin [T, 1, rotary_dim // 2]``.

    The pairs that turn together are ``(i, i + rotary_dim // 2)``, or ``(2i, 2i + 1)`` if ``interleaved``.
    """
    half = cos.shape[-1]
    x1, x2 = (
        (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2])
        if interleaved
        else (x[..., :half], x[..., half : 2 * half])
    )
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    turned = torch.stack([y1, y2], dim=-1).flatten(-2) if interleaved else torch.cat([y1, y2], dim=-1)
    return torch.cat([turned, x[..., 2 * half :]], dim=-1)


def rope_write_kv(call: RotatedWriteCall) -> None:
    """Norm and rotate q into ``q_out``; norm and rotate k and store it with v. One rounding, at the end."""
    check_rope_write_kv(call)
    dtype = exact_dtype(call.q.dtype)
    cos, sin = call.cos_sin[call.positions].to(dtype)[:, None].chunk(2, dim=-1)

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        normed = _rms_norm(x.to(dtype), weight, call.norm_eps, call.norm_offset)
        return _rotate(normed, cos, sin, call.interleaved)

    call.q_out.copy_(turned(call.q, call.q_norm))
    _store(call.write()._replace(k=turned(call.k, call.k_norm)))
