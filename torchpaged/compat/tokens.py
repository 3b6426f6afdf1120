"""Packed tokens of requests: which request each belongs to, where it goes, and rotary embedding by position,
as FlashAttention's cache functions apply it."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_device, check_dims, check_tensors, reads_values
from torchpaged.custom_ops.errors import ArgumentError


class Tokens(NamedTuple):
    """Packed tokens: ``[num_tokens, heads, width]``, the request of each, its place among that request's, and
    how many each request has."""

    x: Tensor
    request: Tensor  # [num_tokens] int64
    place: Tensor  # [num_tokens] int32
    are_real: Tensor | None  # [num_tokens] bool; None: all
    counts: Tensor  # [num_reqs] int32
    starts: Tensor  # [num_reqs + 1] int32


def tokens_of(x: Tensor, starts: Tensor | None) -> Tokens:
    """Of ``x [num_reqs, tokens_each, heads, width]``, or ``[num_tokens, heads, width]`` with ``starts``."""
    if starts is None:
        num_reqs, each = x.shape[:2]
        index = torch.arange(num_reqs * each, device=x.device)
        counts = torch.full((num_reqs,), each, dtype=torch.int32, device=x.device)
        bounds = torch.arange(num_reqs + 1, dtype=torch.int32, device=x.device) * each
        return Tokens(x.flatten(0, 1), index // each, (index % each).to(torch.int32), None, counts, bounds)
    index = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    request = torch.searchsorted(starts[1:], index, right=True)
    are_real = index < starts[-1]
    request = request.clamp(max=starts.shape[0] - 2)
    return Tokens(x, request, index - starts[:-1][request], are_real, starts.diff(), starts)


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


def rotated(
    tokens: Tokens, cos: Tensor, sin: Tensor, first: Tensor, interleaved: bool, all_first: bool
) -> Tensor:
    """The tokens turned by their positions, ``first`` of their request and onwards, or all by the first:
    ``(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)`` over the first columns of each head
    (arXiv:2104.09864), in float32, rounded once.

    Args:
        tokens: ``[num_tokens, heads, head_dim]``.
        cos, sin: ``[max_position, rotary_dim // 2]``; positions behind their end, which only padding has on
            a GPU, take the last row.
        first: ``[num_reqs]`` int32.
        interleaved: the pairs are columns ``(2i, 2i + 1)`` instead of ``(i, i + rotary_dim // 2)``.
        all_first: whether all of a request's tokens are turned by its first position.
    """
    x, half, positions = tokens.x, cos.shape[1], first[tokens.request]
    rows = (positions if all_first else positions + tokens.place).clamp(0, cos.shape[0] - 1)
    c, s = cos[rows].float()[:, None], sin[rows].float()[:, None]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    x1, x2 = (
        (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    )
    pair = (x1 * c - x2 * s, x2 * c + x1 * s)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def slots_of(new: Tokens, lens: Tensor, table: Tensor, block_size: int) -> Tensor:
    """``[num_tokens]`` int64: where each new token is stored; -1 of padding and of what has no place in the
    table, as behind a negative length or one that int32 can't hold, which are not read on a GPU."""
    position = lens[new.request] + new.place
    column = position // block_size
    block = table[new.request, column.clamp(0, table.shape[1] - 1)].long()
    has_place = (column >= 0) & (column < table.shape[1])
    if new.are_real is not None:
        has_place &= new.are_real
    return torch.where(has_place, block * block_size + position % block_size, -1)
