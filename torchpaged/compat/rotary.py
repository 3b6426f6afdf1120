"""Rotary embedding as FlashAttention's cache functions apply it: tables of cosines and sines, gathered by
position."""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_device, check_dims, check_tensors, reads_values
from torchpaged.custom_ops.errors import ArgumentError


def check_rotary(x: Tensor, cos: Tensor, sin: Tensor, last: Tensor) -> None:
    """The tables fit heads of ``x`` and positions up to ``last``.

    Args:
        x: ``[num_tokens, heads, head_dim]``.
        cos, sin: ``[max_position, rotary_dim // 2]``.
        last: int64, the last position of each request.
    """
    check_tensors(rotary_cos=cos, rotary_sin=sin)
    check_dims("rotary_cos", cos, None, None)
    check_dims("rotary_sin", sin, *cos.shape)
    if not 1 <= cos.shape[1] <= x.shape[-1] // 2:
        raise ArgumentError(
            "rotary_cos",
            f"shape [max_position, rotary_dim / 2] with rotary_dim <= {x.shape[-1]}",
            str(list(cos.shape)),
        )
    check_device(x.device, rotary_cos=cos, rotary_sin=sin)
    if last.numel() and reads_values(x.device) and int(last.max()) >= cos.shape[0]:
        raise ArgumentError(
            "rotary_cos", f"a row for each position up to {int(last.max())}", f"{cos.shape[0]} rows"
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """``(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)`` over the first columns of each head
    (arXiv:2104.09864), in float32, rounded once.

    Args:
        x: ``[num_tokens, heads, head_dim]``.
        cos, sin: ``[max_position, rotary_dim // 2]``.
        positions: ``[num_tokens]`` integers; those behind the table's end, which only padding has on a GPU,
            take its last row.
        interleaved: the pairs are columns ``(2i, 2i + 1)`` instead of ``(i, i + rotary_dim // 2)``.
    """
    half = cos.shape[1]
    rows = positions.clamp(0, cos.shape[0] - 1)
    c, s = cos[rows].float()[:, None], sin[rows].float()[:, None]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    x1, x2 = (
        (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    )
    pair = (x1 * c - x2 * s, x2 * c + x1 * s)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)
