"""The slot arithmetic: where in a paged cache the token at a position lies, ``block * block_size + offset``;
on the host and on the device.

    slot_of(17, blocks=[4, 7], block_size=16)              # 7 * 16 + 1
    slots_between(14, 18, blocks=[4, 7], block_size=16)    # array of 78, 79, 112, 113

The ops that move a batch on by themselves (``advance_step``, ``finish_step``) have it in their kernels.
"""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

#: So few numbers Python counts faster than torch.
_FEW = 64


def slot_of(position: int, blocks: Sequence[int], block_size: int) -> int:
    """The slot of the token at ``position``, whatever kind of integers ``blocks`` are."""
    return int(blocks[position // block_size]) * block_size + position % block_size


def slots_between(start: int, end: int, blocks: Sequence[int], block_size: int) -> "array[int]":
    """`slot_of` each position from ``start`` up to ``end``, as signed integers of 64 bits; -1 of those below
    0."""
    if end - start < _FEW:
        return array("q", [slot_of(at, blocks, block_size) if at >= 0 else -1 for at in range(start, end)])
    below = array("q", [-1]) * min(-start, end - start)
    first, start = max(start, 0) // block_size, max(start, 0)
    firsts = array("q", blocks[first : -(-end // block_size)])
    slots = array("q", bytes(8 * len(firsts) * block_size))
    if slots:
        starts = torch.frombuffer(firsts, dtype=torch.int64).mul_(block_size)[:, None]
        offsets = torch.arange(block_size, device="cpu")
        torch.add(starts, offsets, out=torch.frombuffer(slots, dtype=torch.int64).view(-1, block_size))
    return below + slots[start - first * block_size : end - first * block_size]


def positions_between(start: int, end: int) -> "array[int]":
    """The positions themselves."""
    if end - start < _FEW:
        return array("q", range(start, end))
    positions = array("q", bytes(8 * (end - start)))
    torch.arange(start, end, out=torch.frombuffer(positions, dtype=torch.int64), device="cpu")
    return positions


def slots_at(positions: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """`slot_of` on the device: positions ``[num_reqs, n]`` int64 of each request -> ``[num_reqs, n]`` int64;
    -1 of those below 0."""
    column = (positions // block_size).clamp(0, block_table.shape[1] - 1)
    slots = block_table.long().gather(1, column) * block_size + positions % block_size
    return torch.where(positions >= 0, slots, -1)
