"""Blocks on their way from a `torchpaged.cache.disk_tier.DiskTier` to the pools."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

from torchpaged.cache.disk_blocks import Job
from torchpaged.cache.host_blocks import Arrival
from torchpaged.cache.host_tier import Told


class DiskCopy(NamedTuple):
    """A block in the file: its place, and the checksum of what was written."""

    place: int
    checksum: int


class Returning:
    """Blocks that come from the host, and others that come there from the file first: an `Arrival`.

    Args:
        keys, blocks: of all of them.
        arrival: of those that the host has.
        cold: places of the others in ``keys``.
        copies, slots: of these, in the file and on the host.
        job: which reads them.
        told: told how it ended.
        returned: called with it once ``job`` is done: sets `is_over`, and `then` if it was not left.

    Attributes:
        keys, blocks, cold, copies, slots, job, told: as given.
        is_left, is_over: whether no request wants it any more, and whether ``returned`` was called.
        then: of what came from the file; None: nothing, or not yet.
    """

    def __init__(
        self,
        keys: list[Hashable],
        blocks: list[int],
        arrival: Arrival,
        cold: list[int],
        copies: list[DiskCopy],
        slots: list[int],
        job: Job[str],
        told: Told,
        returned: "Callable[[Returning], None]",
    ) -> None:
        self.keys, self.blocks, self.cold, self.copies, self._returned = keys, blocks, cold, copies, returned
        self.slots, self.job, self.told, self._first = slots, job, told, arrival
        self.is_left, self.is_over = False, False
        self.then: Arrival | None = None

    def ready(self) -> bool:
        """See `Arrival`."""
        if not self.is_over:
            if not self.job.done():
                return False
            self._returned(self)
        return self._first.ready() and (self.then is None or self.then.ready())

    def wait(self) -> None:
        """See `Arrival`: the host waits for the file."""
        if not self.is_over:
            self.job.wait()
            self._returned(self)
        self._first.wait()
        if self.then is not None:
            self.then.wait()

    def leave(self) -> None:
        """See `Arrival`."""
        self.is_left = True
        self._first.leave()
        if self.then is not None:
            self.then.leave()
