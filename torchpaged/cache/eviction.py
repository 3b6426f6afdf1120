"""Which blocks a pool gives up first: a policy, and pins.

    class Oldest:  # first in, first out: an `EvictionPolicy`
        def __init__(self):
            self.blocks = {}
        def add(self, block):
            self.blocks.setdefault(block)
        def hit(self, block): ...
        def drop(self, block):
            self.blocks.pop(block, None)
        def evict(self):
            return self.blocks.pop(next(iter(self.blocks)))

    prefixes = PrefixCache(pool, block_size=16, eviction=Oldest())
    pin = prefixes.pin(system_prompt, ttl=3600, priority=1)  # given up after all others

Host data only.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import counted, one_line


@runtime_checkable
class EvictionPolicy(Protocol):
    """The order in which idle blocks without a pin are given up: blocks without holders whose contents are
    kept. Called within a step, once per block: each call should cost O(1). A policy belongs to one pool. What
    it raises is raised to the caller that moved the blocks, and none is lost: one that `add` raised for is
    given up after those that it has."""

    def add(self, block: int) -> None:
        """``block`` has lost its last holder; of a text's blocks the last comes first."""

    def hit(self, block: int) -> None:
        """``block``, which was added, is held again, with the same contents; it may be added again."""

    def drop(self, block: int) -> None:
        """``block``, which was added, has contents that are of no use any more."""

    def evict(self) -> int:
        """The block to give up, of those that were added and not hit, dropped or evicted since."""


def check_policy(eviction: object) -> None:
    """Refuse what is neither None nor an `EvictionPolicy`."""
    if eviction is not None and (isinstance(eviction, type) or not isinstance(eviction, EvictionPolicy)):
        raise ArgumentError(
            "eviction", "None, or an object with add, hit, drop and evict (EvictionPolicy)", repr(eviction)
        )


class LRU:
    """The block that lost its last holder longest ago goes first: the default."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __repr__(self) -> str:
        return one_line(self, counted(len(self._order), "idle block"))

    def add(self, block: int) -> None:
        """See `EvictionPolicy`."""
        self._order[block] = None

    def hit(self, block: int) -> None:
        """See `EvictionPolicy`."""
        del self._order[block]

    drop = hit

    def evict(self) -> int:
        """See `EvictionPolicy`."""
        return self._order.popitem(last=False)[0]


class Pin:
    """What `PrefixCache.pin` pinned.

    Attributes:
        blocks: those that it was given.
        num_tokens: that they hold.
        priority: as given.
        until: by `time.monotonic`; infinite where no ``ttl`` was given.
    """

    def __init__(self, blocks: Sequence[int], num_tokens: int, priority: int, until: float) -> None:
        self.blocks, self.num_tokens, self.priority, self.until = tuple(blocks), num_tokens, priority, until

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_tokens={self.num_tokens}, priority={self.priority})"
