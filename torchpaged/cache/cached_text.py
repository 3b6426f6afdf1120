"""CachedText: one request's text, and how far a prefix cache knows it."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

from torchpaged.cache.block_pool import NULL_BLOCK
from torchpaged.cache.host_blocks import Arrival
from torchpaged.cache.host_tier import HostTier
from torchpaged.cache.prefix_books import EVICTED, NEW, TAIL, TOKEN_BYTES, Key, Place, PrefixBooks, Resumed
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import counted, one_line


class CachedText:
    """The text of one request in a `PrefixCache`. Made by `PrefixCache.text`.

    It knows places in the cache, and holds no block: those that `take` gives are the caller's.

    Attributes:
        has_begun: whether `take` gave blocks.
        resumes: what else is to be copied before it goes on behind these; None: nothing.
        arrival: of those blocks of `take` that are on their way from the host; None: none is.
        num_arriving: how many are, the last of them; fewer once it is known that some do not come.
    """

    def __init__(self, cache: PrefixBooks, tokens: Sequence[int], extra: Hashable) -> None:
        self._cache, self._extra, self._step = cache, extra, cache._step
        self._data, self._num_tokens = bytearray(), 0
        self._epoch, self._drops = cache._epoch, cache._drops
        self._blocks: list[int] = []  # of its first tokens, found so far
        self._place = cache._origin  # of the last of its blocks that is found, or computed
        self._next: Key | None = None  # that was not found
        self._done = 0  # blocks that are taken, or computed
        self._last = NULL_BLOCK  # the one that is known by the tokens of the last block that was computed
        self._promise: Key | None = None  # of the block that it computes next, for which others wait
        self._promised_end = 0  # of the blocks that it is going to compute
        self._waits = False  # what `_find` said at this version of the cache: `_found_at`
        self._counted, self._count, self._is_counted = -1, 0, False
        self.has_begun = False
        self.resumes: Resumed | None = None
        self.arrival: Arrival | None = None
        self.num_arriving = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self._num_tokens

    def __repr__(self) -> str:
        return one_line(
            self, counted(len(self), "token"), f"{counted(self._done, 'block')} taken or computed"
        )

    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens follow, outputs for instance.

        Raises:
            ArgumentError: as `PrefixCache.text`.
        """
        try:
            self._data += array("q", tokens).tobytes()
        except (TypeError, OverflowError) as error:
            raise ArgumentError("tokens", "ids, signed 64-bit integers", str(error)) from error
        self._num_tokens = len(self._data) // TOKEN_BYTES
        # Blocks that it may take. Its last token is in none: that one is always computed.
        self._most = (self._num_tokens - 1) // self._cache.block_size
        self._found_at = -1

    def _tokens(self, place: int, end: int) -> bytes:
        """Of its blocks from ``place`` on, up to ``end``."""
        return bytes(self._data[place * self._step : end * self._step])

    def _key(self, place: int, front: Place) -> Key:
        """Of its block ``place``, behind what is at ``front``."""
        return self._cache.key(front, self._tokens(place, place + 1), self._extra)

    def _find(self) -> bool:
        """Go on to the last block whose keys and values are there; whether another text has promised the one
        behind it."""
        cache = self._cache
        if self._found_at == cache._version:
            return self._waits
        if self._drops != cache._drops:
            self._blocks, self._place = [], cache._origin
            self._drops, self._epoch = cache._drops, cache._epoch
        found, self._place = self._known(len(self._blocks), self._most, self._place)
        self._blocks += found
        place = len(self._blocks)
        self._next = self._key(place, self._place) if place < self._most else None
        self._found_at, self._waits = cache._version, self._next in cache._promised
        return self._waits

    def _known(self, place: int, end: int, front: Place) -> tuple[list[int], Place]:
        """The blocks with the tokens of its blocks from ``place`` on, at most to ``end``, behind what is at
        ``front``, and where the last of them is."""
        blocks = list[int]()
        while place < end:
            count = self._num_alike(place, end, front)
            run, at = front
            if not count:
                child = self._cache._runs.get(self._key(place, front))
                if child is None:
                    break
                run, at, count = child, -1, self._num_alike(place, end, (child, -1))
            known = run.blocks[at + 1 : at + 1 + count]
            if NULL_BLOCK in known:
                del known[known.index(NULL_BLOCK) :]
            if known:
                blocks += known
                place, front = place + len(known), (run, at + len(known))
            if len(known) < count:
                break
        return blocks, front

    def _num_alike(self, place: int, end: int, front: Place) -> int:
        """How many of its blocks from ``place`` on, up to ``end``, have the tokens of those that are behind
        ``front`` in the same run."""
        run, at = front
        ahead = min(len(run.tokens) // self._step - at - 1, end - place)
        return num_alike(run.tokens, at + 1, self._data, place, ahead, self._step) if ahead > 0 else 0

    def known(self) -> list[int]:
        """The blocks that hold its first tokens, full ones, that of its last token among them; not held
        for the caller."""
        return self._known(0, len(self) // self._cache.block_size, self._cache._origin)[0]

    def num_shared(self) -> int:
        """How many of its first blocks other texts hold, or are computing, or are pinned: they cost none of
        the blocks that are free and not pinned. 0 once it has begun."""
        if self.has_begun or self._counted == self._cache._version:
            return 0 if self.has_begun else self._count
        promised = self._find()
        self._count = self._num_costing_nothing(self._blocks) + (self._num_promised() if promised else 0)
        self._counted = self._cache._version
        return self._count

    def _num_promised(self) -> int:
        """How many of its blocks from `_next` on the text computes that has promised this one; 0: none."""
        other: CachedText | None = None if self._next is None else self._cache._promised.get(self._next)
        if other is None:
            return 0
        place = len(self._blocks)  # as that of the other text's block: the same blocks are in front
        count = min(self._most, other._promised_end) - place
        return num_alike(other._data, place, self._data, place, count, self._step)

    def _num_costing_nothing(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks`` are none of those that are free and not pinned."""
        return len(blocks) - self._cache.pool._idle.num_unpinned(blocks)

    def take(self, *, counts: bool = True, swapped: bool = False) -> list[int] | None:
        """The blocks that hold its first tokens, as many as are known, one holder more each; never that of
        its last token. None: another text has promised the one that would be next; ask again. Blocks that the
        host has are allocated, and on their way (`arrival`).

        Args:
            counts: whether the statistics hear of it; False: of a request that they have heard of.
            swapped: what the host has comes back, even where its tokens would be computed sooner.
        """
        cache = self._cache
        if self._find():
            return None
        blocks = self._begin(len(self._blocks), counts and cache.host is None)
        if cache.host is not None:
            cache._not_saved.difference_update(blocks)
            blocks += self._bring(cache.host, swapped)
            self._is_counted = counts
            if counts:
                self._count_tokens(len(self._blocks), "")
        return blocks

    def _bring(self, host: HostTier, always: bool) -> list[int]:
        """Blocks for the copies that the host has of what is behind those that were found; they are on their
        way."""
        cache, pool, front = self._cache, self._cache.pool, self._place
        places, following = list[Place](), list[Key]()
        for at in range(len(self._blocks), self._most):
            following.append(self._key(at, front))
            place = cache._place(front, following[-1][-1], self._extra)
            if place is None or place[0].block(place[1]) or following[-1] in cache._promised:
                break
            if not places and host.has(place):
                host.flush()  # what is found has a slot then; this one may have lost its own
            if not host.has(place):
                break
            places.append(place)
            front = place
        room = max(pool.num_free - pool.num_pinned, 0)
        count = host.worth_loading(places[:room], cache.block_size, always) if places and room else 0
        if not count:
            return []
        own = pool.allocate(count)
        self.num_arriving = count
        self.arrival = host.load(places[:count], own, self._tell)
        self._next = following[count] if count < len(following) else None
        cache.stats.host_tokens += count * cache.block_size
        return own

    def _tell(self, from_disk: int, lost: int, why: str) -> None:
        """How the way back ended; see `torchpaged.cache.host_tier.Told`."""
        stats, size = self._cache.stats, self._cache.block_size
        stats.disk_tokens += from_disk * size
        if not lost:
            return
        self.num_arriving -= lost
        stats.host_tokens -= lost * size
        if self._is_counted:
            stats.hit_tokens -= lost * size
            stats.missed_tokens[why] = stats.missed_tokens.get(why, 0) + lost * size

    def _begin(self, count: int, counts: bool, why_fewer: str = "") -> list[int]:
        """Take ``count`` of the blocks that were found; ``why_fewer``: why no more."""
        cache = self._cache
        blocks = cache.pool.fork(self._blocks[:count]) if count else []
        if count < len(self._blocks):
            self._place = self._known(0, count, cache._origin)[1]
        self._done, self.has_begun = count, True
        cache._version += 1
        if counts:
            self._count_tokens(count, why_fewer)
        return blocks

    def _count_tokens(self, count: int, why_fewer: str) -> None:
        stats, size = self._cache.stats, self._cache.block_size
        stats.queried_tokens += len(self)
        count += self.num_arriving
        stats.hit_tokens += count * size
        found, tail = (len(self._blocks) + self.num_arriving) * size, len(self) - self._most * size
        missed = (TAIL, tail), (self._why(), len(self) - tail - found), (why_fewer, found - count * size)
        for reason, tokens in missed:
            if tokens:
                stats.missed_tokens[reason] = stats.missed_tokens.get(reason, 0) + tokens

    def _why(self) -> str:
        """Why the block behind those that were found is not known."""
        if self._next is None:
            return NEW
        run, place, _, tokens = self._next
        is_lost = self._cache._place((run, place), tokens, self._extra) is not None
        return EVICTED if is_lost else self._cache._reasons.get(self._next, NEW)

    def promise(self) -> None:
        """Its further full blocks are going to be computed: until `leave`, texts that share them wait."""
        self._promised_end = self._most
        self._promise_next()

    def _promise_next(self) -> None:
        """Others wait for the block that it computes next, and so for all that they share behind it."""
        promised = self._cache._promised
        if self._promise is not None and promised.get(self._promise) is self:
            del promised[self._promise]
        self._promise = None
        found, front = self._known(self._done, self._promised_end, self._place)  # left behind by others
        place = self._done + len(found)
        if place < self._promised_end:
            self._promise = self._key(place, front)
            promised.setdefault(self._promise, self)
        self._cache._version += 1

    def computed(self, num_tokens: int, blocks: Sequence[int]) -> None:
        """Its first tokens have their keys and values: others find them from now on.

        Call it when what writes them is launched, in the order of the stream, and did not fail.

        Args:
            num_tokens: how many.
            blocks: its blocks, held by the caller.

        Raises:
            ArgumentError: a block that is free, or known by other tokens.
        """
        cache = self._cache
        if self._epoch != cache._epoch:  # what it took may be of other weights
            return
        if not self.has_begun:
            self._place, self.has_begun = cache._origin, True
        end = min(num_tokens, len(self)) // cache.block_size
        if self._done >= end:
            return
        while (at := self._done) < end:
            count = self._num_alike(at, end, self._place)
            run, place = self._place
            if not count:
                child = cache._runs.get(self._key(at, self._place))
                if child is None:
                    tokens = self._tokens(at, end)
                    self._place = cache._append(self._place, tokens, self._extra, list(blocks[at:end]))
                    self._done = end
                    break
                run, place, count = child, -1, self._num_alike(at, end, (child, -1))
            is_known = run.block(place + 1) != NULL_BLOCK  # others have computed it, too
            length = 1
            while length < count and (run.block(place + 1 + length) != NULL_BLOCK) is is_known:
                length += 1
            if not is_known:
                cache._fill(run, place + 1, list(blocks[at : at + length]))
            self._place, self._done = (run, place + length), at + length
        run, place = self._place
        self._last = run.blocks[place]
        if self._promised_end:
            self._promise_next()

    def chunk(self, num_computed: int, most: int) -> int:
        """How many of its tokens are to be computed at once, behind ``num_computed`` of them; at least 1 and
        at most ``most``."""
        return most

    def checkpoint(self, num_tokens: int) -> int | None:
        """Where a copy of what it has besides its blocks, behind its first ``num_tokens`` tokens, goes; call
        it behind `computed`. None: no such copy is wanted."""
        return None

    def forget(self) -> None:
        """What it took and published is not to be trusted: it is not found any more, nor what is behind. It
        leaves."""
        cache, front = self._cache, self._cache._origin
        done = self._done if self._epoch == cache._epoch else 0
        blocks = list[int]()
        for at in range(done):
            place = cache._place(front, self._tokens(at, at + 1), self._extra)
            if place is None:
                break
            if cache.host is not None:
                cache.host.drop(place)
            if block := place[0].block(place[1]):  # or else another text's, given up
                blocks.append(block)
            front = place
        blocks.reverse()  # the last first: see `Run.lose`
        cache._forgotten(blocks, cache.pool._kept)
        cache._not_saved.difference_update(blocks)
        for block in blocks:
            cache.pool.drop(block)
        if done:  # who computes the first block again finds nothing behind it
            key = self._key(0, cache._origin)
            cache._runs.pop(key, None)
            cache._note(key, "failed")
        self.leave()

    def leave(self) -> None:
        """It computes nothing more: who waits for what it promised does so itself. Before its blocks are
        freed."""
        if self._promised_end:
            self._promised_end = 0
            self._promise_next()
        self._epoch, self.has_begun = -1, True
        self._cache._version += 1


def num_alike(one: bytearray, at: int, other: bytearray, place: int, count: int, step: int) -> int:
    """How many of ``count`` blocks of ``step`` bytes, from ``at`` and from ``place`` on, are the same up to
    the first that is not. What is compared is at most a few times what is the same."""

    def are_alike(begin: int, end: int) -> bool:
        mine = one[(at + begin) * step : (at + end) * step]
        return mine == other[(place + begin) * step : (place + end) * step]

    same, most = 0, min(count, 8)
    while are_alike(same, most):
        if most == count:
            return count
        same, most = most, min(count, 4 * most)
    most -= 1
    while same < most:
        middle = (same + most + 1) // 2
        same, most = (middle, most) if are_alike(same, middle) else (same, middle - 1)
    return same
