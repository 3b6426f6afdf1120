"""Packed tokens of requests: which request each belongs to, and where it goes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.compat.rotary import rotate


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


def rotated(
    tokens: Tokens, cos: Tensor, sin: Tensor, first: Tensor, interleaved: bool, all_first: bool
) -> Tensor:
    """The tokens turned by their positions, ``first`` of their request and onwards, or all by the first."""
    positions = first[tokens.request]
    return rotate(tokens.x, cos, sin, positions if all_first else positions + tokens.place, interleaved)


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
