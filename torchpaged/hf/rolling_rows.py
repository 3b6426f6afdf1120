"""The rings of a cache's rows (`torchpaged.cache.RollingBlocks`), and their tables on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchpaged.cache import RollingBlocks
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.metadata import slots_at
from torchpaged.metadata.fields import BatchSizes, make_batch_tensors
from torchpaged.metadata.host import host_block_table


class RollingRows:
    """The rings of a cache's rows, and their tables on the device.

    Args:
        blocks: the rings.
        width: columns of the table.

    Attributes:
        table: ``[max_rows, width]`` int32; changes with the rows' order only.
    """

    table: Tensor

    def __init__(self, blocks: RollingBlocks, width: int) -> None:
        self.blocks, self._width = blocks, width
        self._longest = 0  # tokens per row, padding included, that were there when tokens were taken back

    def make_tensors(self, device: torch.device) -> None:
        """Tables and slots on ``device``."""
        sizes = BatchSizes(self.blocks.num_rings, self.blocks.num_rings, self._width)
        tensors = make_batch_tensors(("block_table", "slot_mapping"), sizes, device)
        self.table, self._decode_slots = tensors.values()
        for tensor in tensors.values():  # guard=False: a new cache must not recompile the model
            torch._dynamo.mark_static_address(tensor, guard=False)

    def forget(self) -> None:
        """Before another batch."""
        self.blocks.free()
        self._longest = 0

    def upload(self) -> None:
        """The rows' rings to the device's table."""
        rows = [self.blocks.table(ring, self._width) for ring in self.blocks.rings]
        self.table[: len(rows)].copy_(host_block_table(rows, len(rows), self._width))

    def slots_of(self, positions: Tensor) -> Tensor:
        """The slots of ``positions [batch, n]`` int64; -1 of those below 0. ``[batch * n]`` int64."""
        return slots_at(positions, self.table[: positions.shape[0]], self.blocks.block_size).reshape(-1)

    def note_decode(self, positions: Tensor) -> None:
        """The slots of a decode step, ``positions [batch, 1]``, where layers find them."""
        self._decode_slots[: positions.shape[0]].copy_(self.slots_of(positions))

    def decode_slots(self, batch: int) -> Tensor:
        """What `note_decode` was told, ``[batch]`` int64."""
        return self._decode_slots[:batch]

    def require_kept(self, lengths: Sequence[int], total: int, count: int) -> None:
        """Refuse to take back ``count`` tokens where a row's next query would see tokens that were written
        over.

        Args:
            lengths: tokens of each row, without padding.
            total: tokens per row, with padding.
            count: how many of them go.

        Raises:
            ArgumentError: a row lacks them.
        """
        longest = max(self._longest, total)
        for length in lengths:
            if not self.blocks.keeps(length - count, length + longest - total):
                raise ArgumentError(
                    "tokens_to_remove",
                    f"few enough that the layers with a window of {self.blocks.window} tokens still have "
                    "what the next token sees",
                    f"{count}, of rows that were {longest} tokens long",
                    "build the PagedCache with a larger sliding_step",
                )

    def took_back(self, total: int) -> None:
        """Rows of ``total`` tokens, padding included, were cut."""
        self._longest = max(self._longest, total)
