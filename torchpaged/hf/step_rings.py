"""What a packed step's requests keep besides their blocks: rings, for layers with a window, and slots, for
layers with a state. The owner of the requests says which begin and end, the device finds each row's ring by
its first block.

    rings.take(block)           # a request begins: the first of its blocks
    batch = rings.of(metadata)  # within a step, captured or not: the tables and slots of layers with a window
    slots = rings.slots(metadata)  # and of layers with a state
    rings.keep(block, 0)        # a copy of what it has, for others that begin alike
    rings.give(block)           # it ended

A graph's batches, and their buffers, stay as they are without rings.
"""

from dataclasses import replace

import torch
from torch import Tensor

from torchpaged.backends.planned_batch import is_capturing
from torchpaged.cache import PagedKVCache, RollingBlocks
from torchpaged.cache.block_pool import NULL_BLOCK
from torchpaged.cache.prefix_books import Resumed
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.checks import reads_values
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.metadata import AttentionMetadata
from torchpaged.metadata.host import to_device


class StepRings:
    """Rings by the first blocks of requests.

    Args:
        num_rings: requests at once.
        blocks: the rings, of these requests and behind them of the copies; None where layers have states
            alone.
        cache: the pools: of the requests' other blocks, of rings, and of states with as many slots.
        num_checkpoints: copies of a request's rings and states that can be kept, see `keep`.

    Attributes:
        num_rings, blocks, num_checkpoints: as given.
        ring_of_block: ``[num_blocks]`` int32: 1 and the ring of the request that begins with a block, or did
            last; 0: none has.
        num_resets: calls of `reset`.
    """

    num_resets = 0

    def __init__(
        self, num_rings: int, blocks: RollingBlocks | None, cache: PagedKVCache, num_checkpoints: int = 0
    ) -> None:
        self.num_rings, self.blocks, self.num_checkpoints = num_rings, blocks, num_checkpoints
        self._cache, self._own = cache, self._of_rings(cache)
        with torch.inference_mode(False):
            self.ring_of_block = torch.zeros(cache.num_blocks, dtype=torch.int32, device=cache.device)
            ends = torch.tensor([0, cache.num_blocks - 1], device=cache.device)
        self._first, self._last = ends[:1], ends[1:]
        self.reset()

    def reset(self) -> None:
        """No request has a ring."""
        self._free = list(range(self.num_rings - 1, -1, -1))
        self._taken: dict[int, int] = {}
        self.num_resets += 1
        self.ring_of_block.zero_()

    @property
    def num_used(self) -> int:
        """Rings that requests have."""
        return len(self._taken)

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a request's ring and states, and of a copy."""
        return sum(tensor[0].nbytes for tensor in self._own)

    def take(self, block: int) -> None:
        """A request begins, with this as its first block.

        Raises:
            ArgumentError: a request that began with it has not ended, or all rings are taken.
        """
        if block in self._taken or not self._free:
            raise ArgumentError(
                "block",
                f"the first block of another request, of {self.num_rings} at once",
                f"{block}, which has a ring" if block in self._taken else f"one more, {block}",
                "call give(block) when a request ends",
            )
        ring = self._taken[block] = self._free.pop()
        self.ring_of_block[block : block + 1].fill_(ring + 1)

    def give(self, block: int) -> None:
        """The request that began with this block has ended.

        Raises:
            ArgumentError: none that began with it has a ring.
        """
        if block not in self._taken:
            raise ArgumentError("block", "the first block of a request that has a ring", str(block))
        self._free.append(self._taken.pop(block))

    def keep(self, block: int, checkpoint: int) -> None:
        """Copy what the request that began with ``block`` has now, behind all steps launched so far."""
        self._copy(self._taken[block], self.num_rings + checkpoint)

    def resume(self, block: int, resumed: Resumed) -> None:
        """The request that has begun with ``block`` goes on from a copy: of a ring and states, and in
        ``block`` of the first block of the request that had them."""
        if block != resumed.first_block:
            pair = to_device([resumed.first_block, block], torch.int64, self._cache.device)
            self._cache.copy_blocks(pair[None], BACKEND_OPS["default"])
        self._copy(self.num_rings + resumed.checkpoint, self._taken[block])

    def _of_rings(self, cache: PagedKVCache) -> list[Tensor]:
        """What layers with rings or states keep, by ring: ``[num_rings + num_checkpoints, blocks, ...]``."""
        found = []
        for layer in cache.blocks_of:
            entries = 1 if layer in cache.per_request or self.blocks is None else self.blocks.blocks_per_ring
            tensors = cache.layers[layer].block_tensors(cache[layer]).values()
            found += [tensor[1:].unflatten(0, (-1, entries)) for tensor in tensors]
        return found

    def _copy(self, source: int, destination: int) -> None:
        for tensor in self._own:
            tensor[destination].copy_(tensor[source])

    def require(self, metadata: AttentionMetadata) -> None:
        """Refuse requests that have no ring, where values are read; elsewhere, as long as no request has one.

        Raises:
            ArgumentError: some have none, so that their keys or states would be lost.
        """
        device = metadata.seq_lens.device
        if not reads_values(device) and (self._taken or is_capturing(device)):
            return
        first = metadata.block_table[metadata.seq_lens > 0, 0].tolist()
        without = sorted(set(first) - self._taken.keys())
        if without:
            raise ArgumentError(
                "metadata",
                "requests that have rings, as layers with a window (sliding_step) or a state keep them",
                f"some that begin with blocks {without} and have none",
                "call paged.rings.take(block) with the first block of a request that begins and "
                "paged.rings.give(block) when it ends"
                + (", or make the PagedModel without sliding_step" if self.blocks is not None else ""),
            )

    def slots(self, metadata: AttentionMetadata) -> Tensor:
        """``[num_reqs]`` int32: 1 and the ring of each row's request, its slot in pools of states; or 0."""
        known = metadata.state_slots
        return self.slots_of(metadata.block_table) if known is None else known

    def slots_of(self, block_table: Tensor) -> Tensor:
        """`slots` of the requests of a block table."""
        # ends of int64 make the clamped blocks int64, too, which are looked up faster than int32
        return self.ring_of_block[block_table[:, 0].clamp(self._first, self._last)]

    def of(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """The same step with the tables and slots of the rings."""
        table, rings = metadata.block_table, self.slots(metadata)
        columns = torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
        blocks = self._blocks(rings[:, None], columns)
        return replace(metadata, block_table=blocks, slot_mapping=self._slots(metadata, rings), prefixes=None)

    def _blocks(self, rings: Tensor, columns: Tensor) -> Tensor:
        """Which block is in a column of a table; ``rings`` as `ring_of_block` has them."""
        assert self.blocks is not None
        size = self.blocks.blocks_per_ring
        return torch.where(rings > 0, (rings - 1) * size + 1 + columns % size, NULL_BLOCK)

    def _slots(self, metadata: AttentionMetadata, rings: Tensor) -> Tensor:
        """Of each token, by its place in its request; -1 of padding."""
        assert metadata.slot_mapping is not None and self.blocks is not None
        seq_lens, starts, size = metadata.seq_lens, metadata.query_start_loc, self.blocks.block_size
        count = metadata.slot_mapping.shape[0]
        if metadata.max_query_len == 1 and count == seq_lens.shape[0]:
            positions = seq_lens.long() - 1
        else:
            tokens = torch.arange(count, dtype=torch.int32, device=seq_lens.device)
            rows = torch.searchsorted(starts[1:], tokens, right=True).clamp_max(seq_lens.shape[0] - 1)
            positions, rings = (seq_lens[rows] - starts[rows + 1] + tokens).long(), rings[rows]
        slots = self._blocks(rings.long(), positions // size) * size + positions % size
        return torch.where((metadata.slot_mapping >= 0) & (positions >= 0), slots, -1)
