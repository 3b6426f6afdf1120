"""The slot arithmetic: where in a paged cache the token at a position lies, ``block * block_size + offset``;
on the host and on the device.

    slot_of(17, blocks=[4, 7], block_size=16)              # 7 * 16 + 1
    slots_between(14, 18, blocks=[4, 7], block_size=16)    # [78, 79, 112, 113]

The ops that move a batch on by themselves (``advance_step``, ``finish_step``) have it in their kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def slot_of(position: int, blocks: Sequence[int], block_size: int) -> int:
    """The slot of the token at ``position``."""
    return blocks[position // block_size] * block_size + position % block_size


def slots_between(start: int, end: int, blocks: Sequence[int], block_size: int) -> list[int]:
    """`slot_of` each position from ``start`` up to ``end``; -1 of those below 0."""
    if 0 <= start == end - 1:  # a decode, as most rows of a batch are
        return [int(blocks[start // block_size]) * block_size + start % block_size]
    slots = [-1] * min(-start, end - start)
    for column in range(max(start, 0) // block_size, -(-end // block_size)):
        first = column * block_size
        shift = int(blocks[column]) * block_size - first
        slots += range(shift + max(start, first), shift + min(end, first + block_size))
    return slots


def slots_at(positions: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """`slot_of` on the device: positions ``[num_reqs, n]`` int64 of each request -> ``[num_reqs, n]`` int64;
    -1 of those below 0."""
    column = (positions // block_size).clamp(0, block_table.shape[1] - 1)
    slots = block_table.long().gather(1, column) * block_size + positions % block_size
    return torch.where(positions >= 0, slots, -1)
