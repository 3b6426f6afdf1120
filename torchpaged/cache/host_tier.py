"""HostTier: what a pool gives up goes to host memory, and comes back when a text finds it there.

    prefixes = PrefixCache(pool, block_size=16, host=HostTier(HostBlocks(cache, memory_budget=8 * 2**30)))
    blocks = text.take()                 # of those known on the host, too: they are on their way then
    blocks += pool.allocate(...)
    prefixes.host.flush()                # before anything is launched that writes into these blocks
    if text.arrival is not None:
        text.arrival.wait()              # before anything reads them

A block that came back keeps its copy on the host until others need the slot: given up again, it costs no
second copy. Of the copies the one used longest ago goes first. Each operation costs O(1) per block.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

from torchpaged.cache.host_blocks import Arrival, HostBlocks
from torchpaged.custom_ops.words import counted, one_line

#: Called once a load has ended: blocks that a disk had, blocks at the end that did not arrive, and why.
Told: TypeAlias = Callable[[int, int, str], None]


class HostTier:
    """Copies of blocks by their places in a `PrefixCache`, which calls it.

    Args:
        host: where the copies are.
        recompute_seconds: gives the seconds that a token takes to compute; copies are left where that is
            faster than the way back. None: they always come back.

    Attributes:
        blocks, recompute_seconds: as given.
        saved_blocks, loaded_blocks: copied to the host so far, and back.
    """

    def __init__(self, host: HostBlocks, recompute_seconds: Callable[[], float] | None = None) -> None:
        self.blocks, self.recompute_seconds = host, recompute_seconds
        self.saved_blocks = self.loaded_blocks = 0
        self._entries: OrderedDict[Hashable, int] = OrderedDict()  # slots
        self._free = list[int]()
        self._queue: dict[Hashable, int] = {}  # blocks that were given up since the last `flush`
        self._leaving: list[tuple[Arrival, set[int]]] = []  # slots that are read
        self.clear()

    def __repr__(self) -> str:
        return one_line(
            self,
            f"{len(self)} of {counted(self.blocks.num_slots, 'block')} filled",
            f"{self.saved_blocks} saved",
            f"{self.loaded_blocks} loaded",
        )

    def __len__(self) -> int:
        """Blocks that have a copy, those of the next `flush` left out."""
        return len(self._entries)

    @property
    def num_slots(self) -> int:
        """Blocks that may have a copy at once."""
        return self.blocks.num_slots

    def is_cheaper(self, num_blocks: int, block_size: int, out: bool = False) -> bool:
        """Whether blocks come back faster than their tokens are computed; ``out``: with the way to the host
        added."""
        if self.recompute_seconds is None:
            return True
        host, count = self.blocks, num_blocks * self.blocks.bytes_per_block
        seconds = count / host.in_rate + (count / host.out_rate if out else 0.0)
        return seconds < num_blocks * block_size * self.recompute_seconds()

    def worth_loading(self, keys: Sequence[Hashable], block_size: int, always: bool = False) -> int:
        """How many of the first of these copies, which follow each other in a text, `load` is to bring;
        ``always``: those that the host has, however long that takes."""
        return len(keys) if always or self.is_cheaper(len(keys), block_size) else 0

    def save(self, key: Hashable, block: int) -> None:
        """The pool gives ``block`` up: the next `flush` copies it, unless there is a copy."""
        if key not in self._queue and self.has(key):
            self._touch(key)
        else:
            self._queue[key] = block

    def flush(self) -> None:
        """Start the copies of what was given up: before what takes the blocks writes into them."""
        if not self._queue:
            return
        queue, self._queue = list(self._queue.items())[-self.blocks.num_slots :], {}
        slots = sorted(self._take_slots(len(queue)))  # neighbours are one copy
        blocks = [block for _, block in queue[: len(slots)]]
        for (key, _), slot in zip(queue, slots, strict=False):
            self._entries[key] = slot
        self._leaving = [pair for pair in self._leaving if not pair[0].ready()]
        if any(not read.isdisjoint(slots) for _, read in self._leaving):
            self.blocks.wait_for_arrivals()
        self.blocks.swap_out(blocks, slots)
        self.saved_blocks += len(blocks)

    def _take_slots(self, count: int) -> list[int]:
        """Free ones, then those of the copies used longest ago; as many as there are."""
        slots = list[int]()
        while len(slots) < count and (self._free or self._entries):
            slots.append(self._free.pop() if self._free else self._entries.popitem(last=False)[1])
        return slots

    def _touch(self, key: Hashable) -> None:
        """The copy of ``key`` is used."""
        self._entries.move_to_end(key)

    def has(self, key: Hashable) -> bool:
        """Whether there is a copy."""
        return key in self._entries or key in self._queue

    def load(
        self, keys: Sequence[Hashable], blocks: Sequence[int], told: Told = lambda cold, lost, why: None
    ) -> Arrival:
        """Start the way back of the copies of ``keys``, none of which waits for `flush`, into ``blocks``."""
        kept = {key: self._entries.pop(key) for key in keys}  # what is given up now takes other slots
        try:
            self.flush()
            return self._swap_in(list(kept.values()), blocks)
        finally:
            self._entries.update(kept)  # or else these slots are lost

    def _swap_in(self, slots: Sequence[int], blocks: Sequence[int]) -> Arrival:
        pairs = sorted(zip(slots, blocks, strict=True))
        arrival = self.blocks.swap_in([slot for slot, _ in pairs], [block for _, block in pairs])
        self._leaving.append((arrival, set(slots)))
        self.loaded_blocks += len(slots)
        return arrival

    def drop(self, key: Hashable) -> None:
        """The copy of ``key`` is of no use any more; nothing if there is none."""
        self._queue.pop(key, None)
        if key in self._entries:
            self._free.append(self._entries.pop(key))

    def clear(self) -> None:
        """The same of all."""
        self._queue.clear()
        self._entries.clear()
        self._free = list(range(self.blocks.num_slots - 1, -1, -1))  # those of a `load` that raised, too

    def close(self) -> None:
        """Nothing is copied any more."""
