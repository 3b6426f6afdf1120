"""PrefixBooks: which blocks of a pool hold which tokens, and what texts promise to compute.

Blocks that follow each other are a `Run`, which has their tokens: a text is compared with these as a whole,
and only where it leaves one run for another, or ends one, is a key looked up. A key is a place in a run and
the bytes of the tokens behind it, so that nothing rests on a hash. `torchpaged.cache.PrefixCache` is what
users have of it, and `CachedText` moves through it. Host data only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torchpaged.cache.block_pool import NULL_BLOCK, BlockPool
from torchpaged.cache.eviction import EvictionPolicy, check_policy
from torchpaged.cache.host_tier import HostTier
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError, NotCopied
from torchpaged.custom_ops.words import counted, one_line, repr_of_fields

#: Why tokens were not found: they were new; the pool needed their blocks; they fill no block, or are
#: the last block of a text, whose last token is always computed since its logits are wanted.
NEW, EVICTED, TAIL = "new", "evicted", "tail"
#: Of a token's id in a key.
TOKEN_BYTES = 8


@dataclass
class PrefixCacheStats:
    """Counters of a `PrefixCache`. ``queried_tokens`` are ``hit_tokens`` and all of ``missed_tokens``.

    Attributes:
        queried_tokens: of texts that asked for what is known.
        hit_tokens: those that were known.
        missed_tokens: the others by the reason why a hit ended where it did: "new", they had not been
            computed; "evicted", the pool needed the blocks, so that a larger one would have had them; "tail",
            they fill no block, or are the block with a text's last token, which is always computed; what
            `PrefixCache.clear` was told; the two reasons of `torchpaged.cache.checkpoints`; and "disk: ..."
            of blocks that did not come back as they were written.
        evicted_blocks: blocks given up for other tokens.
        host_tokens: brought back from the host, for requests that were put back as well.
        disk_tokens: those of them that came from a disk.
        checkpoints, evicted_checkpoints: kept so far, and given up for others.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    missed_tokens: dict[str, int] = field(default_factory=dict)
    evicted_blocks: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    checkpoints: int = 0
    evicted_checkpoints: int = 0

    def __repr__(self) -> str:
        return repr_of_fields(self)


class KnownBlock(NamedTuple):
    """A block's tokens and what is in front of them.

    Attributes:
        parent: the place of the block in front in a list of such; -1: it begins a text.
        tokens: ids, 8 bytes each.
        extra: what `PrefixCache.text` was told, of a block that begins a text.
    """

    parent: int
    tokens: bytes
    extra: Hashable


class Resumed(NamedTuple):
    """What a text goes on from besides the blocks that it took, see `torchpaged.cache.checkpoints`.

    Attributes:
        checkpoint: of its state.
        first_block: the one that its own first block is to be a copy of.
    """

    checkpoint: int
    first_block: int


class Run:
    """Blocks of texts that follow each other, in the order in which they were first known.

    Attributes:
        key: by which it is found, behind the last block of another run: see `PrefixBooks.key`.
        tokens: of its blocks, `TOKEN_BYTES` each; also of those that were given up, as long as these are
            remembered, so that what is behind them is found again once they are known.
        blocks: those that are known, and `NULL_BLOCK` where one was given up; the last one is known.
        is_open: whether more can follow its last tokens; False: some of them are not remembered any more.
    """

    __slots__ = ("blocks", "is_open", "key", "tokens")

    def __init__(self, key: Any = None) -> None:
        self.key: Key = key
        self.tokens, self.blocks, self.is_open = bytearray(), list[int](), True

    def block(self, place: int) -> int:
        """The one at a place; `NULL_BLOCK`: it is not known."""
        return self.blocks[place] if place < len(self.blocks) else NULL_BLOCK

    def lose(self, blocks: list[int], at: int) -> Sequence[int]:
        """Those from ``at`` on, as far as they are its last ones, last first, or one are not known any more;
        their places. Costs O(1) per block, of one that is not its last O(blocks of the run)."""
        own = self.blocks
        count = most = min(len(own), len(blocks) - at)
        if own[: -most - 1 : -1] != blocks[at : at + most]:
            count = next(n for n in range(most) if own[-1 - n] != blocks[at + n])
        places: Sequence[int] = range(len(own) - 1, len(own) - count - 1, -1)
        if count:
            del own[-count:]
        else:
            places = [own.index(blocks[at])]
            own[places[0]] = NULL_BLOCK
        while own and own[-1] == NULL_BLOCK:
            own.pop()
        return places


#: A run, and the place of a block in it; -1: in front of the first.
Place: TypeAlias = tuple[Run, int]
#: A place, what a text's first block depends on besides tokens, and the tokens of the block behind the place.
Key: TypeAlias = tuple[Run, int, Hashable, bytes]


class PrefixBooks(NotCopied):
    """What the blocks of a pool hold, by keys; arguments and attributes are those of `PrefixCache`."""

    _BOUND, _ADVICE = "it says what the blocks of one pool hold", "make a new one of the copied pool"

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        keep: bool = True,
        eviction: EvictionPolicy | None = None,
        host: HostTier | None = None,
    ) -> None:
        check_sizes(block_size=block_size)
        check_policy(eviction)
        pool.watch(self._given_up, keep, eviction, None if host is None else host.flush)
        self.host, self._not_saved = host, set[int]()  # of the latter: blocks that go to no host
        self.pool, self.block_size, self.keeps = pool, block_size, keep
        self.stats = PrefixCacheStats()
        self._step = block_size * TOKEN_BYTES
        self._origin: Place = Run(), -1  # in front of every text; this run has no blocks
        self._origin[0].is_open = False
        self._reasons: dict[Key, str] = {}  # why texts that begin with a key are not known any more
        self._version = 0  # another one when what is known or held may have changed
        self._drops = 0  # blocks that are not known any more
        self._epoch = 0  # times that all were forgotten
        self._forget_all()

    def _forget_all(self) -> None:
        self._runs: dict[Key, Run] = {}
        self._promised: dict[Key, Any] = {}  # the `CachedText` that computes the block behind a place
        # Runs that lost blocks, the latest and those before them, with the end of the places of these; and
        # how many blocks the latest lost.
        self._lost: dict[Run, int] = {}
        self._lost_before: dict[Run, int] = {}
        self._num_lost = 0

    def __repr__(self) -> str:
        return one_line(self, *self._facts())

    def _facts(self) -> list[str]:
        """Of its repr, the most important one first."""
        facts = [
            f"{len(self)} of {counted(self.pool.num_usable, 'block')} known",
            f"{self.stats.hit_tokens} of {counted(self.stats.queried_tokens, 'token')} found",
            f"block_size={self.block_size}",
        ]
        return facts if self.host is None else [*facts, f"{counted(len(self.host), 'block')} on the host"]

    def __len__(self) -> int:
        """Blocks whose tokens are known."""
        return len(self.pool._kept)

    def clear(self, reason: str) -> None:
        """Forget all blocks; those that are held stay so. Texts of before publish nothing any more.

        Args:
            reason: why, for `PrefixCacheStats.missed_tokens`.
        """
        for key, run in self._runs.items():
            if key[0] is self._origin[0]:
                self._note(key, reason if run.block(0) else EVICTED)
        self._forget_all()
        self._not_saved.clear()  # of what the blocks held
        if self.host is not None:
            self.host.clear()
        self._version, self._drops, self._epoch = self._version + 1, self._drops + 1, self._epoch + 1
        self.pool.drop_all()

    # ---------------------------------------------------------------------------------------------- snapshots
    def known(self) -> list[tuple[KnownBlock, int]]:
        """What is known, and in which block, what is in front of a block before it. Blocks whose beginning
        was given up are left out: they are not found."""
        behind: dict[Place, list[Run]] = {}
        runs = list[tuple[Run, int, Hashable]]()  # with the place in `found` of what is in front
        for key, run in self._runs.items():
            front, place, extra, _ = key
            if front is self._origin[0]:
                runs.append((run, -1, extra))
            else:
                behind.setdefault((front, place), []).append(run)
        found: list[tuple[KnownBlock, int]] = []
        for run, parent, extra in runs:  # it grows meanwhile
            for place, block in enumerate(run.blocks):
                if block == NULL_BLOCK:
                    break
                tokens = bytes(run.tokens[place * self._step : (place + 1) * self._step])
                found.append((KnownBlock(parent, tokens, extra), block))
                parent, extra = len(found) - 1, None
                runs += [(child, parent, None) for child in behind.get((run, place), ())]
        return found

    def find(self, texts: Sequence[KnownBlock]) -> list[int | None]:
        """The blocks that hold these; None: unknown."""
        places: list[Place | None] = []
        for text in texts:
            front = places[text.parent] if text.parent >= 0 else self._origin
            place = None if front is None else self._place(front, text.tokens, text.extra)
            places.append(None if place is None or not place[0].block(place[1]) else place)
        return [None if place is None else place[0].block(place[1]) for place in places]

    def publish(self, texts: Sequence[KnownBlock], blocks: Sequence[int]) -> None:
        """Each of ``texts`` is in one of ``blocks``, which the caller holds: others find it from now on. What
        is known already stays where it is."""
        places: list[Place] = []
        for text, block in zip(texts, blocks, strict=True):
            front = places[text.parent] if text.parent >= 0 else self._origin
            place = self._place(front, text.tokens, text.extra)
            if place is None:
                place = self._append(front, text.tokens, text.extra, [block])
            elif not place[0].block(place[1]):
                self._fill(*place, [block])
            places.append(place)

    # ------------------------------------------------------------------------------------------- the books
    def key(self, front: Place, tokens: bytes, extra: Hashable) -> Key:
        """Of a block's tokens behind a place; ``extra``: of its text, which counts where texts begin."""
        run, place = front
        return run, place, extra if run is self._origin[0] else None, tokens

    def _place(self, front: Place, tokens: bytes, extra: Hashable) -> Place | None:
        """Where a block's tokens are behind a place, known or remembered; None: nowhere."""
        run, place = front
        at = (place + 1) * self._step
        if run.tokens[at : at + self._step] == tokens:
            return run, place + 1
        child = self._runs.get(self.key(front, tokens, extra))
        return None if child is None else (child, 0)

    def _append(self, front: Place, tokens: bytes, extra: Hashable, blocks: list[int]) -> Place:
        """Keys and values of ``tokens`` are in ``blocks``: the first of them is nowhere behind ``front``. The
        place of the last of them."""
        run, place = front
        if run.is_open and len(run.tokens) == (place + 1) * self._step:
            self._fill(run, place + 1, blocks, tokens)
            return run, place + len(blocks)
        run = Run(self.key(front, tokens[: self._step], extra))
        self._fill(run, 0, blocks, tokens)
        self._runs[run.key] = run
        return run, len(blocks) - 1

    def _fill(self, run: Run, place: int, blocks: list[int], tokens: bytes = b"") -> None:
        """Keys and values from ``place`` on, which are not known, are in ``blocks``; ``tokens``: of these, if
        the run does not have them."""
        if not self.pool._kept.keys().isdisjoint(blocks):
            block = next(block for block in blocks if block in self.pool._kept)
            raise ArgumentError("blocks", "blocks of these tokens alone", f"block {block} of other tokens")
        self.pool.keep(blocks, run)
        run.tokens += tokens
        run.blocks += [NULL_BLOCK] * (place - len(run.blocks))
        run.blocks[place : place + len(blocks)] = blocks
        self._version += 1

    def _given_up(self, blocks: list[int], run_of: dict[int, Run]) -> None:
        """The pool needs ``blocks`` of these runs, or they have no holders and nothing is kept."""
        host, not_saved = self.host, self._not_saved
        for run, places, lost in self._forgotten(blocks, run_of):
            if host is not None:
                for place, block in zip(places, lost, strict=True):
                    if block not in not_saved:
                        self._num_lost -= host.has((run, place))  # it takes no other copy's slot
                        host.save((run, place), block)
            elif not self.keeps:
                self._cut(run)
        if self.keeps:
            self.stats.evicted_blocks += len(blocks)
        if host is not None:
            not_saved.difference_update(blocks)

    def _forgotten(
        self, blocks: list[int], run_of: dict[int, Run]
    ) -> list[tuple[Run, Sequence[int], list[int]]]:
        """What ``blocks`` of these runs hold is not known any more; runs, places and blocks, in parts."""
        parts, at = list[tuple[Run, Sequence[int], list[int]]](), 0
        while at < len(blocks):
            run = run_of[blocks[at]]
            places = run.lose(blocks, at)
            parts.append((run, places, blocks[at : at + len(places)]))
            self._lost[run], at = max(self._lost.get(run, 0), places[0] + 1), at + len(places)
        self._version, self._drops, self._num_lost = self._version + 1, self._drops + 1, self._num_lost + at
        # At least as many blocks that were given up last are remembered as the pool and the host have, with
        # those in front of them in their runs.
        if self._num_lost >= self.pool.num_blocks + (0 if self.host is None else self.host.num_slots):
            oldest, self._lost_before = self._lost_before, self._lost
            self._lost, self._num_lost = {}, 0
            for run in oldest:
                self._cut(run, self._lost_before.get(run, 0))
        return parts

    def _cut(self, run: Run, end: int = 0) -> None:
        """What it has lost behind its last block, from place ``end`` on, is not remembered any more."""
        size = max(len(run.blocks), end) * self._step
        if len(run.tokens) > size:
            del run.tokens[size:]
            run.is_open = False  # what was behind these tokens is behind no others
        if not size and self._runs.get(run.key) is run:
            del self._runs[run.key]

    def _note(self, key: Key, reason: str) -> None:
        """Why texts that begin with ``key`` are not known any more, of as many as the pool has blocks at
        most."""
        if len(self._reasons) >= self.pool.num_blocks:
            del self._reasons[next(iter(self._reasons))]
        self._reasons[key] = reason
