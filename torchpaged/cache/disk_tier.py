"""DiskTier: a `HostTier` whose oldest copies go on to a file, and come back through host memory.

    host = HostBlocks(cache, memory_budget=8 * 2**30)
    disk = DiskBlocks("/scratch", size=100 * 2**30, row_bytes=host.bytes_per_block)
    prefixes = PrefixCache(pool, block_size=16, host=DiskTier(host, disk))

Half of the host's slots, or as many as the pool has given up at once, is kept free or holds copies that the
file has, too: there is room for what the pool gives up and for what comes back from the file. Threads write
and read (`DiskBlocks`); the caller alone changes the books, in the calls of a `HostTier`. Where the file is
too slow, what was used longest ago is lost, as without it.

A block that can't be written is not found later. One that does not come back as it was written ends the hit
in front of it, and is forgotten: its tokens are computed as if they had not been found.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from torchpaged.cache.disk_blocks import DiskBlocks, DiskCopy, Job, Returning, why
from torchpaged.cache.host_blocks import Arrival, HostBlocks
from torchpaged.cache.host_tier import HostTier, Told

_LOG = logging.getLogger("torchpaged.cache")


class DiskTier(HostTier):
    """Copies of blocks by their places in a `PrefixCache`, on the host and in a file.

    Args:
        host, recompute_seconds: as for `HostTier`.
        disk: of the same row size.

    Attributes:
        disk: as given.
        errors: blocks that were not written, or did not come back, by reason.
        written_blocks, read_blocks: those that were.
    """

    def __init__(
        self, host: HostBlocks, disk: DiskBlocks, recompute_seconds: Callable[[], float] | None = None
    ) -> None:
        self.disk, self.errors = disk, dict[str, int]()
        self.written_blocks = self.read_blocks = 0
        self._spare = max(min(host.num_slots, disk.num_slots) // 2, 1)
        self._num_places = disk.num_slots
        self._clean: OrderedDict[Hashable, int] = OrderedDict()  # slots of those that the file has, too
        self._on_disk: OrderedDict[Hashable, DiskCopy] = OrderedDict()  # that used longest ago first
        self._free_places, self._next_place = list[int](), 0
        self._writing: dict[Hashable, tuple[int, int]] = {}  # slot, place
        self._writes: list[tuple[list[Hashable], Job[int | Exception]]] = []
        self._reading = set[Hashable]()
        self._returning: list[Returning] = []  # not copied to the pools yet
        super().__init__(host, recompute_seconds)

    def __len__(self) -> int:
        return len(self._entries) + len(self._clean) + len(self._writing)

    @property
    def num_slots(self) -> int:
        """See `HostTier`."""
        return self.blocks.num_slots + self.disk.num_slots

    @property
    def num_on_disk(self) -> int:
        """Blocks that the file has."""
        return len(self._on_disk) + len(self._reading)

    # ---------------------------------------------------------------------------------------- to the file
    def flush(self) -> None:
        """See `HostTier`; and of those copies the oldest go to the file."""
        if self._writes or self._returning:
            self._collect()
        if self._queue:
            # Or else a text that comes to the host at once pushes out the end of the one before that is not
            # written yet: its first blocks, without which the others are not found.
            most = min(self.blocks.num_slots, self.disk.num_slots // 2)
            self._spare = max(self._spare, min(len(self._queue), most))
            super().flush()
            self._write_ahead()

    def _write_ahead(self) -> None:
        keys, rows = list[Hashable](), []
        while self._entries and len(self._free) + len(self._clean) + len(self._writing) < self._spare:
            place = self._take_place()
            if place is None:
                break
            key, slot = self._entries.popitem(last=False)
            self._writing[key] = slot, place
            keys.append(key)
            rows.append((place, self.blocks.row(slot)))
        if keys:
            self._writes.append((keys, self.disk.write(rows, self.blocks.fence())))

    def _take_place(self) -> int | None:
        """In the file; None: there is none."""
        if self._free_places:
            return self._free_places.pop()
        if self._next_place < self._num_places:
            self._next_place += 1
            return self._next_place - 1
        if not self._on_disk:
            return None
        key, copy = self._on_disk.popitem(last=False)
        if key in self._clean:
            self._entries[key] = self._clean.pop(key)
            self._entries.move_to_end(key, last=False)
        return copy.place

    def _collect(self) -> None:
        """What the threads have done; nothing is waited for."""
        while self._writes and self._writes[0][1].done():
            keys, job = self._writes.pop(0)
            for key, result in zip(keys, job.wait(), strict=True):
                self._written(key, result)
        for one in [one for one in self._returning if one.is_left and one.job.done()]:
            self._returned(one)

    def _written(self, key: Hashable, result: int | Exception) -> None:
        slot, place = self._writing.pop(key)
        if isinstance(result, int):
            self._clean[key], self._on_disk[key] = slot, DiskCopy(place, result)
            self.written_blocks += 1
            return
        # This place is not used again; where the disk is full, nor are those that were not tried yet.
        self._num_places = min(self._num_places, self._next_place)
        self._free.append(slot)
        self._count(why(result), "not written")

    def _count(self, reason: str, what: str) -> None:
        if reason not in self.errors:
            _LOG.warning("a block was %s: %s; such blocks are computed again, and counted", what, reason)
        self.errors[reason] = self.errors.get(reason, 0) + 1

    # -------------------------------------------------------------------------------------------- the books
    def _take_slots(self, count: int) -> list[int]:
        """See `HostTier`; first those of copies that the file has, too."""
        slots = list[int]()
        while len(slots) < count and (self._free or self._clean):
            slots.append(self._free.pop() if self._free else self._clean.popitem(last=False)[1])
        return slots + super()._take_slots(count - len(slots))

    def has(self, key: Hashable) -> bool:
        """See `HostTier`."""
        books = self._clean, self._writing, self._on_disk, self._reading
        return super().has(key) or any(key in book for book in books)

    def _touch(self, key: Hashable) -> None:
        for book in (self._entries, self._clean, self._on_disk):
            if key in book:
                book.move_to_end(key)

    def drop(self, key: Hashable) -> None:
        """See `HostTier`."""
        super().drop(key)
        self._reading.discard(key)  # `_returned` keeps nothing then
        if key in self._writing:
            self._settle_writes()
        if key in self._clean:
            self._free.append(self._clean.pop(key))
        if key in self._on_disk:
            self._free_places.append(self._on_disk.pop(key).place)

    def _settle_writes(self) -> None:
        for _, job in self._writes:
            job.wait()
        self._collect()

    def clear(self) -> None:
        """See `HostTier`; waits for what is read or written right now."""
        self._reading.clear()
        for one in list(self._returning):  # for the requests that wait
            one.job.wait()
            self._returned(one)
        self._settle_writes()
        self._clean.clear()
        self._on_disk.clear()
        self._free_places.clear()
        self._next_place = 0
        super().clear()

    def close(self) -> None:
        """See `HostTier`."""
        self.disk.close()

    # --------------------------------------------------------------------------------------- from the file
    def _slot(self, key: Hashable) -> int:
        """Of a copy on the host."""
        for book in (self._entries, self._clean):
            if key in book:
                return book[key]
        return self._writing[key][0]

    def _is_cold(self, key: Hashable) -> bool:
        return not (key in self._entries or key in self._clean or key in self._writing)

    def worth_loading(self, keys: Sequence[Hashable], block_size: int, always: bool = False) -> int:
        """See `HostTier`; as many as there is room on the host for without a loss, and none behind one that
        is on its way."""
        room, cold = len(self._free) + len(self._clean), list[int]()
        for place, key in enumerate(keys):
            if key in self._reading:
                keys = keys[:place]
                break
            if self._is_cold(key):
                cold.append(place)
        room -= sum(key in self._clean for key in keys)
        if len(cold) > room:
            keys, cold = keys[: cold[room]], cold[:room]
        if cold and self.recompute_seconds is not None:
            count = self.blocks.bytes_per_block
            ahead = sum(len(one.cold) for one in self._returning if not one.job.done())
            seconds = len(keys) * count / self.blocks.in_rate
            seconds += (ahead + len(cold)) * count / self.disk.in_rate
            if seconds >= len(keys) * block_size * self.recompute_seconds():
                keys = keys[: cold[0]]
                self.disk.note_unread()
        return super().worth_loading(keys, block_size, always)

    def load(
        self, keys: Sequence[Hashable], blocks: Sequence[int], told: Told = lambda cold, lost, why: None
    ) -> Arrival:
        """See `HostTier`; at most as many as `worth_loading` said."""
        cold = [place for place, key in enumerate(keys) if self._is_cold(key)]
        warm = sorted({*range(len(keys))}.difference(cold))
        of_warm = [self._slot(keys[place]) for place in warm]
        books = self._entries, self._clean
        held = [(book, key, book.pop(key)) for book in books for key in keys if key in book]
        slots = self._take_slots(len(cold))  # none of `held`
        try:
            super().flush()
            arrival = self._swap_in(of_warm, [blocks[place] for place in warm])
        except BaseException:
            self._free += slots
            raise
        finally:
            for book, key, entry in held:
                book[key] = entry
        if not cold:
            return arrival
        copies = [self._on_disk.pop(keys[place]) for place in cold]
        self._reading.update(keys[place] for place in cold)
        rows = [(copy.place, self.blocks.row(slot)) for copy, slot in zip(copies, slots, strict=True)]
        job = self.disk.read(rows, [copy.checksum for copy in copies], self.blocks.fence())
        one = Returning(list(keys), list(blocks), arrival, cold, copies, slots, job, told, self._returned)
        self._returning.append(one)
        return one

    def _returned(self, one: Returning) -> None:
        """Its reads are done: the books say so, and what others go on from is on its way to the pools."""
        self._returning.remove(one)
        faults, good, end = one.job.wait(), list[tuple[int, int]](), len(one.keys)
        reason = ""
        for place, copy, slot, fault in zip(one.cold, one.copies, one.slots, faults, strict=True):
            key = one.keys[place]
            is_wanted = key in self._reading
            self._reading.discard(key)
            if is_wanted and not fault and not self.has(key):
                self._clean[key], self._on_disk[key] = slot, copy
            else:
                self._free.append(slot)
                self._free_places.append(copy.place)
            if fault:
                self._count(fault, "not read back")
                end, reason = min(end, place), reason or f"disk: {fault}"
            elif place < end:
                good.append((slot, one.blocks[place]))
        num_read = sum(not fault for fault in faults)
        self.read_blocks += num_read
        self.disk.note_read(num_read, one.job.seconds)
        one.told(len(good), len(one.keys) - end, reason)
        one.is_over = True
        if not one.is_left:
            one.then = self._swap_in([slot for slot, _ in good], [block for _, block in good])
