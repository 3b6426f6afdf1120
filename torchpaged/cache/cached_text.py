"""CachedText: one request's text, and how far a prefix cache knows it."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from itertools import islice, repeat
from operator import add

from torchpaged.cache.block_pool import NULL_BLOCK
from torchpaged.cache.host_blocks import Arrival
from torchpaged.cache.host_tier import HostTier
from torchpaged.cache.prefix_books import EVICTED, NEW, TAIL, TOKEN_BYTES, PrefixBooks, Resumed
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
        self._cache, self._extra, self._step = cache, extra, cache.block_size * TOKEN_BYTES
        self._data, self._num_tokens = b"", 0
        self.extend(tokens)
        self._epoch, self._drops = cache._epoch, cache._drops
        self._blocks: list[int] = []  # of its first tokens, found so far
        self._name = b""  # of the last of its blocks that is found, or computed
        self._next: Hashable = None  # the key that was not found
        self._done = 0  # blocks that are taken, or computed
        self._last = NULL_BLOCK  # the one that is known by the tokens of the last block that was computed
        self._pending: dict[Hashable, bytes] = {}  # names by the keys that it promised
        self._ahead: list[Hashable] = []  # keys from block `_done` at `promise` on
        self._first = 0  # the place of the first of these
        self._counted, self._count, self._is_counted = -1, 0, False
        self.has_begun = False
        self.resumes: Resumed | None = None
        self.arrival: Arrival | None = None
        self.num_arriving = 0

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

    def _key(self, place: int, name: bytes) -> Hashable:
        """Of its block ``place``, behind one of this name."""
        tokens = self._data[place * self._step : (place + 1) * self._step]
        if place:
            return name + tokens
        return tokens if self._extra is None else (self._extra, tokens)

    def _find(self) -> bool:
        """Go on to the last block whose keys and values are there; whether another text has promised the one
        behind it."""
        cache = self._cache
        if self._drops != cache._drops:
            self._blocks, self._name = [], b""
            self._drops, self._epoch = cache._drops, cache._epoch
        found, self._name, self._next = self._known(len(self._blocks), self._most, self._name)
        self._blocks += found
        return self._next is not None and self._next in cache._promised

    def _known(self, place: int, end: int, name: bytes) -> tuple[list[int], bytes, Hashable]:
        """The blocks with the tokens of its blocks from ``place`` on, at most to ``end``, behind one of this
        name; the name of the last of them, and the key that is not known, None if all are."""
        table, names, data, step = self._cache._table, self._cache._names, self._data, self._step
        blocks = list[int]()
        for at in range(place * step, end * step, step):
            key = name + data[at : at + step] if at else self._key(0, name)
            block = table.get(key)
            if block is None:
                return blocks, name, key
            blocks.append(block)
            name = names[block]
        return blocks, name, None

    def known(self) -> list[int]:
        """The blocks that hold its first tokens, full ones, that of its last token among them; not held
        for the caller."""
        return self._known(0, len(self) // self._cache.block_size, b"")[0]

    def num_shared(self) -> int:
        """How many of its first blocks other texts hold, or are computing, or are pinned: they cost none of
        the blocks that are free and not pinned. 0 once it has begun."""
        if self.has_begun or self._counted == self._cache._version:
            return 0 if self.has_begun else self._count
        waits, promised = self._find(), self._cache._promised
        self._count = self._num_costing_nothing(self._blocks)
        place, key = len(self._blocks), self._next
        while waits and key in promised:
            self._count, place = self._count + 1, place + 1
            if place == self._most:
                break
            key = self._key(place, promised[key])
        self._counted = self._cache._version
        return self._count

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
        if (self._next is not None and self._next in cache._promised) or self._find():
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
        cache, pool, key, keys = self._cache, self._cache.pool, self._next, list[Hashable]()
        if key is not None and host.name(key) is not None:
            host.flush()  # what is found has a slot then
        while key is not None and key not in cache._table and key not in cache._promised:
            name = host.name(key)
            if name is None:
                break
            keys.append(key)
            place = len(self._blocks) + len(keys)
            key = self._key(place, name) if place < self._most else None
        room = max(pool.num_free - pool.num_pinned, 0)
        count = host.worth_loading(keys[:room], cache.block_size, always) if keys and room else 0
        if not count:
            return []
        own = pool.allocate(count)
        self.num_arriving = count
        self.arrival = host.load(keys[:count], own, self._tell)
        self._next = keys[count] if count < len(keys) else key
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
        self._name = cache._names[blocks[-1]] if blocks else b""
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
        why = NEW if self._next is None else self._cache._remembered(self._next) or NEW
        return EVICTED if isinstance(why, bytes) else why

    def promise(self) -> None:
        """Its further full blocks are going to be computed: until `leave`, texts that share them wait."""
        cache, name, ahead = self._cache, self._name, list[Hashable]()
        self._first, self._ahead = self._done, ahead
        while (place := self._done + len(ahead)) < self._most:
            key = self._key(place, name)
            if key in cache._promised:  # by others
                break
            if key in cache._table:  # left behind by others
                ahead.append(key)
                name = cache._names[cache._table[key]]
                continue
            keys, names = self._unknown(place, self._most, key)
            ahead += keys
            name, mine = names[-1], dict(zip(keys, names, strict=True))
            self._pending.update(mine)
            cache._promised.update(mine)
        cache._version += 1

    def _unknown(self, place: int, end: int, key: Hashable) -> tuple[list[Hashable], list[bytes]]:
        """Keys and names of its blocks from ``place`` on, whose ``key`` is neither known nor promised: of
        that one alone if its name is remembered, since what is behind it may be known; or else of all up
        to ``end``: no key has begun with a new name."""
        name = self._cache._known_name(key)
        if name is not None:
            return [key], [name]
        names, step, data = list(islice(self._cache._new_names, end - place)), self._step, self._data
        behind = [data[at : at + step] for at in range((place + 1) * step, end * step, step)]
        return [key, *map(add, names, behind)], names

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
            self._name, self.has_begun = b"", True
        end = min(num_tokens, len(self)) // cache.block_size
        while (place := self._done) < end:
            keys, names = self._promises(place, end)
            promised = keys
            if not keys:
                key = self._key(place, self._name)
                block = cache._table.get(key)
                if block is not None:  # others have computed it, too
                    self._last, self._name, self._done = block, cache._names[block], place + 1
                    continue
                name = cache._promised.get(key)
                keys, names = self._unknown(place, end, key) if name is None else ([key], [name])
                promised = [key]
            own = blocks[place : place + len(keys)]
            cache._fill(keys, names, own, promised)
            self._last, self._name, self._done = own[-1], names[-1], place + len(keys)

    def _promises(self, place: int, end: int) -> tuple[list[Hashable], list[bytes]]:
        """Keys and names of its blocks from ``place`` on, at most to ``end``, that it promised and nobody
        else has computed meanwhile."""
        at = place - self._first
        keys = self._ahead[at : at + end - place]
        first = keys[0] if keys else b""
        if place and not (isinstance(first, bytes) and first.startswith(self._name)):
            return [], []  # the one in front had another name by then
        names = list(map(self._pending.get, keys, repeat(b"")))  # which is nobody's name
        now = list(map(self._cache._promised.get, keys))
        if names != now:
            count = next(i for i, name in enumerate(names) if name != now[i])
            keys, names = keys[:count], names[:count]
        return keys, names

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
        cache, name = self._cache, b""
        for place in range(self._done if self._epoch == cache._epoch else 0):
            key = self._key(place, name)
            block = cache._table.get(key)
            if cache.host is not None:
                cache.host.drop(key)
            if block is None:  # another text's, given up: who computes it again would find what is behind
                again = cache._promised.get(key) or cache._remembered(key)
                if not isinstance(again, bytes):
                    break
                name = again
                continue
            name = cache._names[block]
            cache._note(cache._forgotten([block]), ["failed"])
            cache._not_saved.discard(block)
            cache.pool.drop(block)
        self.leave()

    def leave(self) -> None:
        """It computes nothing more: who waits for what it promised does so itself. Before its blocks are
        freed."""
        promised = self._cache._promised
        for key, name in self._pending.items():
            if promised.get(key) == name:
                del promised[key]
        self._epoch, self.has_begun, self._pending = -1, True, {}
        self._cache._version += 1
