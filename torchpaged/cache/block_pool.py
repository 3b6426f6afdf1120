"""BlockPool: which blocks are free, and how many sequences hold each of the others. Host data only,
no tensors.

    pool = BlockPool(num_blocks=1024)
    blocks = pool.allocate(3)     # [1, 2, 3]; block 0 is the null block and never handed out
    child = pool.fork(blocks)     # the same blocks, one more holder each
    pool.free(blocks); pool.free(child)

Allocating and freeing a block cost O(1). A call that fails changes nothing.

What a block holds may outlive its holders (`PrefixCache`): such blocks are idle, count as free, and are
handed out when no others are left, in the order of an `EvictionPolicy`.
"""

import operator
import weakref
from collections.abc import Callable, Sequence
from itertools import filterfalse, repeat
from typing import Any

from torchpaged.cache.eviction import EvictionPolicy
from torchpaged.cache.idle_blocks import IdleBlocks
from torchpaged.custom_ops.checks import is_int
from torchpaged.custom_ops.errors import ArgumentError, BlockPoolExhaustedError
from torchpaged.custom_ops.words import counted

#: Padding rows of a graph point here: always valid memory, never a request's tokens.
NULL_BLOCK = 0


def check_num_blocks(num_blocks: object) -> None:
    """There is at least one block besides the null block."""
    if not is_int(num_blocks) or num_blocks < 2:  # type: ignore[operator]
        raise ArgumentError(
            "num_blocks", "an int of at least 2 (block 0 is the null block)", repr(num_blocks)
        )


class BlockPool:
    """A free list and reference counts over block ids from 1 to ``num_blocks - 1``.

    >>> pool = BlockPool(8)
    >>> blocks = pool.allocate(2)
    >>> blocks, pool.fork(blocks)
    ([1, 2], [1, 2])
    >>> pool.free(blocks)
    >>> pool
    BlockPool(5 of 7 blocks free)

    Args:
        num_blocks: blocks in the pool's tensors, the null block included; at least 2.

    Attributes:
        idle: blocks without holders that hold what may be wanted again, and pins (`IdleBlocks.pin`).
        peak_used: blocks held at once at most.
        is_alone: True for a copy or an unpickled pool, whose blocks' tensors were not copied with it, until
            an owner of such tensors sets it to False.
    """

    def __init__(self, num_blocks: int) -> None:
        check_num_blocks(num_blocks)
        self.num_blocks = num_blocks
        self._held = set[int]()
        self._more: dict[int, int] = {}  # holders besides the first, of blocks that have some
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: the block freed last is the warmest
        self._kept: dict[int, Any] = {}  # blocks that outlive their holders, and what they hold
        self.idle = IdleBlocks(None, self._kept, self._held)  # those of `_kept` without holders
        self._given_up: Callable[[list[int], dict[int, Any]], None] | None = None
        self._flush: Callable[[], None] | None = None
        self._keeps_idle = True
        self.peak_used = 0
        self.is_alone = False
        self._copier: weakref.WeakMethod[Callable[[list[tuple[int, int]]], None]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, without the callbacks of `watch` and `copied_by`."""
        free, kept = [*self._free, *reversed(list(self.idle))], dict[int, Any]()
        idle = IdleBlocks(None, kept, self._held)
        forgotten: dict[str, Any] = {"_free": free, "_kept": kept, "idle": idle, "_given_up": None}
        return self.__dict__ | forgotten | {"_copier": None, "_flush": None, "is_alone": True}

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out at all (all but the null block)."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now: those without holders, idle ones among them."""
        return self.num_blocks - 1 - len(self._held)

    @property
    def num_pinned(self) -> int:
        """Idle blocks that are pinned: those to be handed out last."""
        return self.idle.num_pinned

    @property
    def num_unpinned(self) -> int:
        """Blocks that can be handed out now and are not pinned."""
        return self.num_blocks - 1 - len(self._held) - self.idle.num_pinned

    @property
    def num_used(self) -> int:
        """Blocks held now."""
        return len(self._held)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_free} of {counted(self.num_usable, 'block')} free)"

    def ref_count(self, block: int) -> int:
        """How many holders ``block`` has."""
        self._check(block, held=False)
        return self._more.get(block, 0) + 1 if block in self._held else 0

    def is_shared(self, block: int, leaving: int = 0) -> bool:
        """Whether others would see what is written into ``block``, once ``leaving`` of its holders are gone:
        another holder, or texts to come that find it (`keep`)."""
        self._check(block)
        return self.ref_count(block) - leaving > 1 or block in self._kept

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, one holder each.

        Raises:
            BlockPoolExhaustedError: fewer are free; the pool is left as it was.
        """
        if not is_int(count) or count < 0:
            raise ArgumentError("count", "an int of at least 0 blocks", repr(count))
        if count > self.num_free:
            raise BlockPoolExhaustedError(count, self.num_free, self.num_usable)
        if not count:
            return []
        free = self._free
        while len(free) < count:
            self._give_up(self.idle.evict(count - len(free)))
        taken = free[: -count - 1 : -1]
        del free[-count:]
        self._hold(taken)
        return taken

    def _hold(self, blocks: Sequence[int]) -> None:
        """These have a holder now."""
        self._held.update(blocks)
        if len(self._held) > self.peak_used:
            self.peak_used = len(self._held)

    def fork(self, blocks: Sequence[int]) -> list[int]:
        """Share ``blocks`` with one more holder (prefix sharing, beams); returns them as a new list.

        Raises:
            ArgumentError: a block is unknown, free and not idle, the null block, or there twice: no sequence
                has a block twice. Nothing is shared then.
        """
        held, different = self._held, self._different(blocks)
        idle: Sequence[int] = []
        if different is not None:
            idle = blocks if held.isdisjoint(different) else list(filterfalse(held.__contains__, blocks))
        if different is None or not all(map(self._kept.__contains__, idle)):
            for block in blocks:
                self._check(block)
            if len(set(blocks)) < len(blocks):
                raise ArgumentError("blocks", "every block once", str(list(blocks)))
            idle = [block for block in blocks if block not in held]
        return self._share(blocks, idle)

    def fork_kept(self, blocks: Sequence[int]) -> list[int]:
        """`fork` of blocks that were given to `keep`, each once: they are not looked at again."""
        idle = blocks if self._held.isdisjoint(blocks) else list(filterfalse(self._held.__contains__, blocks))
        return self._share(blocks, idle)

    def _share(self, blocks: Sequence[int], idle: Sequence[int]) -> list[int]:
        """One more holder for ``blocks``, of which ``idle`` have none."""
        held, more = self._held, self._more
        self.idle.hit(idle)
        if len(idle) < len(blocks):
            for block in filter(held.__contains__, blocks) if idle else blocks:
                more[block] = more.get(block, 0) + 1
        self._hold(idle)
        return list(blocks)

    def _different(self, blocks: Sequence[int]) -> set[int] | None:
        """``blocks`` as a set if they are plain integers, each once, else None; looked at as a whole, which
        is quicker than `_check` of each."""
        if operator.countOf(map(type, blocks), int) < len(blocks):
            return None
        different = set(blocks)
        return different if len(different) == len(blocks) else None

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each of ``blocks``; a block without holders becomes free, the last of them
        first.

        Raises:
            ArgumentError: a block is unknown, the null block, or freed more often than held; nothing is
                freed then.
        """
        if not isinstance(blocks, (list, Sequence)):  # a list is known to be one at once
            raise ArgumentError("blocks", "a list of block ids", repr(blocks))
        different = self._different(blocks)
        if different is None or not self._held >= different:
            self._require_held(blocks)
        kept, left = self._kept, list(blocks)[::-1]
        if self._more and not self._more.keys().isdisjoint(blocks):
            left = list(filterfalse(self._is_shared_once_less, left))
        self._held.difference_update(left)
        idle = list(filter(kept.__contains__, left)) if kept else []
        if len(idle) < len(left):
            self._free += filterfalse(kept.__contains__, left) if idle else left
        if idle and self._keeps_idle:
            self.idle.add(idle)
        elif idle:
            self._give_up(idle)

    def _is_shared_once_less(self, block: int) -> bool:
        """Whether ``block`` had another holder besides one that gives it up."""
        more = self._more.pop(block, 0)
        if more > 1:
            self._more[block] = more - 1
        return more > 0

    def _require_held(self, blocks: Sequence[int]) -> None:
        """Refuse blocks that are not held as often as they are there."""
        leaving: dict[int, int] = {}
        for block in blocks:
            self._check(block)
            leaving[block] = leaving.get(block, 0) + 1
            if leaving[block] > self.ref_count(block):
                raise ArgumentError(
                    "blocks",
                    f"block {block} at most {self.ref_count(block)} times",
                    f"{leaving[block]} times (double free)",
                )

    # ------------------------------------------------------------------------------------- copy-on-write
    def copied_by(self, copier: Callable[[list[tuple[int, int]]], None]) -> None:
        """Blocks' tensors are copied by this method, called with ``(source, destination)`` pairs. Its object,
        which owns the tensors, is not kept alive."""
        self._copier = weakref.WeakMethod(copier)

    @property
    def copier(self) -> Callable[[list[tuple[int, int]]], None] | None:
        """The method of `copied_by`, called behind the ``flush`` of `watch`; None: there is none, or its
        object is gone."""
        copier, flush = None if self._copier is None else self._copier(), self._flush
        if copier is None or flush is None:
            return copier

        def flushed(pairs: list[tuple[int, int]]) -> None:
            flush()
            copier(pairs)

        return flushed

    # ----------------------------------------------------------------------------- what outlives its holders
    def watch(
        self,
        given_up: Callable[[list[int], dict[int, Any]], None],
        keeps_idle: bool = True,
        policy: EvictionPolicy | None = None,
        flush: Callable[[], None] | None = None,
    ) -> None:
        """Set the callbacks for blocks whose contents are lost.

        Args:
            given_up: called with blocks of `keep` when what they hold is no longer kept, and with that by
                block.
            keeps_idle: blocks of `keep` stay idle without holders until others need them; False: they are
                given up with their last holder.
            policy: which idle block is given up first; None: as `LRU`.
            flush: called before anything is copied into blocks that were given up (`copier`).

        Raises:
            ArgumentError: another watches.
        """
        if self._given_up is not None:
            raise ArgumentError("pool", "a BlockPool of no other PrefixCache", "one that has one")
        self._given_up, self._keeps_idle, self._flush = given_up, keeps_idle, flush
        self.idle = IdleBlocks(policy, self._kept, self._held)

    def keep(self, blocks: Sequence[int], what: Any) -> None:
        """What ``blocks``, which have holders, hold may outlive these: the callback of `watch` gets ``what``.

        Raises:
            ArgumentError: a block that is free, or kept already.
        """
        if not self._held.issuperset(blocks):
            for block in blocks:
                self._check(block)
        if not self._kept.keys().isdisjoint(blocks):
            block = next(block for block in blocks if block in self._kept)
            raise ArgumentError("blocks", "blocks of these tokens alone", f"block {block} of other tokens")
        self._kept.update(zip(blocks, repeat(what), strict=False))

    def drop(self, block: int) -> None:
        """What ``block`` holds is of no use any more; nothing if it was not kept."""
        if block in self.idle:
            self._free.append(block)
        try:
            self.idle.drop(block)
        finally:
            self._kept.pop(block, None)

    def drop_all(self) -> None:
        """The same, of all blocks."""
        self._free += reversed(list(self.idle))
        self._kept.clear()
        self.idle.drop_all()

    def _give_up(self, blocks: list[int]) -> None:
        self._free += blocks
        try:
            if self._given_up is not None:
                self._given_up(blocks, self._kept)
        finally:
            for block in blocks:
                del self._kept[block]

    def reset(self) -> None:
        """Forget all holders, and what blocks hold: every block is free. For an owner whose own books are
        lost."""
        try:
            self._give_up(list(reversed(self._kept)))  # of a run the last first, which costs less
        finally:  # the callback may raise: all is free even then
            for books in (self._held, self._more, self._kept):
                books.clear()
            self._free = list(range(self.num_blocks - 1, 0, -1))
            self.idle.drop_all()

    def _check(self, block: int, held: bool = True) -> None:
        if not is_int(block) or not NULL_BLOCK < block < self.num_blocks:
            raise ArgumentError(
                "blocks", f"block ids in [1, {self.num_blocks})", repr(block), "block 0 is the null block"
            )
        if held and block not in self._held and block not in self._kept:
            raise ArgumentError("blocks", "blocks that are held", f"block {block}, which is free")
