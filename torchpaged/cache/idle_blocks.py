"""The idle blocks of a pool, in the order in which it gives them up: policy and pins of eviction.py."""

import heapq
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from itertools import chain, filterfalse

from torchpaged.cache.eviction import EvictionPolicy, Pin
from torchpaged.custom_ops.checks import is_int
from torchpaged.custom_ops.errors import ArgumentError

#: Places in the order of idle blocks, of such that are held again, before they are cleared away.
_MOST_STALE = 1024


class IdleBlocks:
    """The idle blocks of a pool, in the order in which it gives them up: those without a pin, as the policy
    says, then pinned ones, of the lowest priority first, and of equal ones the one that was left longest
    ago. Each operation costs O(1) per block, and O(priorities in use) where all idle blocks are pinned.

    Args:
        policy: for those without a pin; None: the one left longest ago goes first, as `LRU` says.
        kept, held: blocks whose contents are kept, and blocks with holders, as the pool has them; those in
            the former and not in the latter are idle.
    """

    def __init__(
        self, policy: EvictionPolicy | None, kept: Mapping[int, object], held: AbstractSet[int]
    ) -> None:
        self._policy, self._kept, self._held = policy, kept, held
        self._refused: dict[int, None] = {}  # that its add() raised for, in order
        # Those without a pin, that left longest ago first, from place `_first` on. A block that was taken out
        # stays there, and is passed over as often as `_stale` says: so blocks come and go many at a time.
        self._order, self._first, self._num_unpinned = list[int](), 0, 0
        self._stale = Counter[int]()
        self._priorities: dict[int, int] = {}  # of pinned ones
        self._pinned: dict[int, OrderedDict[int, None]] = {}  # these by priority, longest left first
        self._pins: dict[int, dict[Pin, None]] = {}  # by block, idle or held
        self._ends: list[tuple[float, int, Pin]] = []  # a heap
        self._num_ends = 0  # ever pushed, so that no two pins are compared
        self._prune_at = 16

    def __len__(self) -> int:
        return self._num_unpinned + len(self._priorities)

    def __contains__(self, block: object) -> bool:
        return block in self._kept and block not in self._held

    def __iter__(self) -> Iterator[int]:
        return chain(self._in_order(), self._priorities)

    def _in_order(self) -> list[int]:
        """Those without a pin: of a block's places the last one counts, if any does."""
        order, stale = self._order[self._first :], self._stale
        places = Counter(order) if stale else {}
        out = {block for block, times in stale.items() if times >= places[block]}
        last = list(dict.fromkeys(reversed(order)))[::-1] if stale else order
        return list(filterfalse(out.__contains__, last)) if out else last

    @property
    def num_pinned(self) -> int:
        """Idle blocks that are pinned now."""
        if self._ends:
            self._expire()
        return len(self._priorities)

    def num_unpinned(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks``, which are kept, are idle without a pin."""
        if self._ends:
            self._expire()
        idle = list(filterfalse(self._held.__contains__, blocks))
        pinned = self._priorities
        return len(list(filterfalse(pinned.__contains__, idle))) if pinned else len(idle)

    def add(self, blocks: Sequence[int]) -> None:
        """``blocks`` have lost their last holders, one after the other."""
        pins_of, unpinned = self._pins, blocks
        if pins_of:
            unpinned = [block for block in blocks if block not in pins_of]
            for block in blocks:
                if block in pins_of:
                    self._place(block, max(pin.priority for pin in pins_of[block]))
        self._order += unpinned
        self._num_unpinned += len(unpinned)
        if self._policy is not None:
            self._give(self._policy, unpinned)

    def _give(self, policy: EvictionPolicy, blocks: Iterable[int]) -> None:
        """Tell the policy of all of ``blocks``, whatever it raises; of several errors the first is raised."""
        error: BaseException | None = None
        for block in blocks:
            try:
                policy.add(block)
            except BaseException as raised:
                self._refused[block] = None
                error = error or raised
        if error is not None:
            raise error

    def hit(self, blocks: Sequence[int]) -> None:
        """Idle blocks are held again."""
        if self._policy is not None:  # first: where it raises, they stay
            told = list[int]()
            try:
                for block in blocks:
                    if block not in self._priorities and block not in self._refused:
                        self._policy.hit(block)
                        told.append(block)
            except BaseException:
                self._give(self._policy, reversed(told))  # still idle: else it would never give them up
                raise
        if self._priorities:
            for block in blocks:
                self._take(block)
        else:
            self._take_unpinned(blocks)

    def drop(self, block: int) -> None:
        """What ``block`` holds is of no use any more, nor are its pins."""
        self._pins.pop(block, None)
        if block in self and self._take(block) and self._policy is not None:
            self._policy.drop(block)

    def drop_all(self) -> None:
        """The same of all blocks."""
        dropped = [block for block in self._in_order() if block not in self._refused]
        self._order, self._first, self._num_unpinned, self._stale = [], 0, 0, Counter()
        self._refused, self._priorities, self._pinned, self._pins, self._ends = {}, {}, {}, {}, []
        if self._policy is not None:
            with ExitStack() as told:  # of all, whatever it raises
                for block in reversed(dropped):
                    told.callback(self._policy.drop, block)

    def evict(self, most: int = 1) -> list[int]:
        """Take out the blocks to give up, in their order, of which there are some.

        Args:
            most: so many at most; at least one is taken out.

        Raises:
            ArgumentError: the policy gave a block that it did not have; it is not given up.
        """
        if self._ends and self._priorities:
            self._expire()
        if not self._num_unpinned:
            block = next(iter(self._pinned[min(self._pinned)]))
            self.drop(block)
            return [block]
        if self._policy is None:
            return self._oldest(min(most, self._num_unpinned))
        all_refused = len(self._refused) == self._num_unpinned
        block = next(iter(self._refused)) if all_refused else self._policy.evict()
        if block not in self or block in self._priorities:
            raise ArgumentError(
                "eviction",
                "a policy whose evict() gives a block that it was given by add() and that is still idle",
                f"block {block!r} of {type(self._policy).__name__}",
            )
        self._take(block)
        return [block]

    def _oldest(self, count: int) -> list[int]:
        """The first ``count`` of `_order`, taken out of it."""
        oldest: list[int] = []
        stale = self._stale
        self._num_unpinned -= count
        while len(oldest) < count:
            some = self._order[self._first : self._first + count - len(oldest)]
            assert some, "fewer idle blocks than were counted"
            self._first += len(some)
            known = stale.keys().isdisjoint(some)
            oldest += some if known else [b for b in some if b not in stale or not _is_stale(b, stale)]
        if self._first > _MOST_STALE and 2 * self._first > len(self._order):
            del self._order[: self._first]
            self._first = 0
        return oldest

    # ------------------------------------------------------------------------------------------------- pins
    def pin(self, blocks: Sequence[int], num_tokens: int, ttl: float | None, priority: int) -> Pin:
        """Give up these blocks, idle or held, after all without a pin; several pins of a block count as the
        one of the highest priority. Idle ones are then those that were left last, the last of them first. It
        ends with what they hold (`BlockPool.drop`).

        Args:
            blocks: with contents that are kept.
            num_tokens: that they hold.
            ttl: seconds until the pin ends by itself; None: it does not.
            priority: pins of lower ones go first.

        Raises:
            ArgumentError: a block whose contents are not kept, a ``ttl`` that is no positive number, or a
                ``priority`` that is no integer.
        """
        lost = next((block for block in blocks if block not in self._kept), None)
        if lost is not None:
            raise ArgumentError("blocks", "blocks whose contents are kept", f"block {lost}")
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not ttl > 0):
            raise ArgumentError("ttl", "None, or seconds above 0", repr(ttl))
        if not is_int(priority):
            raise ArgumentError("priority", "an integer", repr(priority))
        pin = Pin(blocks, num_tokens, priority, math.inf if ttl is None else time.monotonic() + ttl)
        idle = [block for block in dict.fromkeys(reversed(pin.blocks)) if block in self]
        self.hit(idle)  # first: where the policy raises, nothing is pinned
        for block in pin.blocks:
            self._pins.setdefault(block, {})[pin] = None
        self.add(idle)
        if ttl is not None:
            if len(self._ends) >= self._prune_at:  # those that ended early would stay until their time
                self._ends = [end for end in self._ends if self._lives(end[2])]
                heapq.heapify(self._ends)
                self._prune_at = 2 * len(self._ends) + 16
            self._num_ends += 1
            heapq.heappush(self._ends, (pin.until, self._num_ends, pin))
        return pin

    def unpin(self, pin: Pin) -> None:
        """End a pin; nothing if it has ended. Its idle blocks are those that were left last."""
        blocks = [block for block in dict.fromkeys(reversed(pin.blocks)) if pin in self._pins.get(block, ())]
        idle = [block for block in blocks if block in self]
        self.hit(idle)
        for block in blocks:
            del self._pins[block][pin]
            if not self._pins[block]:
                del self._pins[block]
        self.add(idle)  # last: where the policy raises, none is pinned any more

    def _lives(self, pin: Pin) -> bool:
        """Whether a block has it."""
        return any(pin in self._pins.get(block, ()) for block in pin.blocks)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._ends and self._ends[0][0] <= now:
            self.unpin(heapq.heappop(self._ends)[2])

    def _place(self, block: int, priority: int) -> None:
        self._priorities[block] = priority
        self._pinned.setdefault(priority, OrderedDict())[block] = None

    def _take(self, block: int) -> bool:
        """Take an idle block out; whether the policy has it."""
        priority = self._priorities.pop(block, None)
        if priority is None:
            known = block not in self._refused
            self._take_unpinned([block])
            return known
        of_priority = self._pinned[priority]
        del of_priority[block]
        if not of_priority:
            del self._pinned[priority]
        return False

    def _take_unpinned(self, blocks: Sequence[int]) -> None:
        self._num_unpinned -= len(blocks)
        if self._refused:
            for block in filter(self._refused.__contains__, blocks):
                del self._refused[block]
        newest = len(self._order) - len(blocks)
        if self._order[newest:] == list(reversed(blocks)):  # left last, as what a text has that comes again
            del self._order[newest:]
            return
        self._stale.update(blocks)
        if len(self._order) - self._first > 2 * self._num_unpinned + _MOST_STALE:
            self._order, self._first, self._stale = self._in_order(), 0, Counter()


def _is_stale(block: int, stale: Counter[int]) -> bool:
    """Whether this place of ``block`` in the order is one to pass over, which is noted."""
    times = stale.pop(block, 0)
    if times > 1:
        stale[block] = times - 1
    return times > 0
