"""CachedText: one request's text, and how far a prefix cache knows it; TieredText: the same where the cache
has copies of blocks on the host."""

from array import array
from collections.abc import Hashable, Sequence
from contextlib import ExitStack

from torchpaged.cache.host_blocks import Arrival
from torchpaged.cache.host_tier import HostTier
from torchpaged.cache.prefix_books import EVICTED, NEW, TAIL, PrefixBooks, Resumed
from torchpaged.cache.runs import TOKEN_BYTES, Key, Place, num_alike
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
        self._cache, self._runs, self._extra = cache, cache._runs, extra
        self._data = bytearray()
        self._epoch, self._drops = cache._epoch, cache._drops
        self._blocks: list[int] = []  # of its first tokens, found so far
        self._place = cache._runs.origin  # of the last of its blocks that is found, or computed
        self._next: Key | None = None  # that was not found
        self._is_lost = False  # that one, by now
        self._done = 0  # blocks that are taken, or computed
        self._promise: Key | None = None  # of the block that it computes next, for which others wait
        self._promised_end = 0  # of the blocks that it is going to compute
        self.has_begun = False
        self.resumes: Resumed | None = None
        self.arrival: Arrival | None = None
        self.num_arriving = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._data) // TOKEN_BYTES

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
            if not isinstance(tokens, array) or tokens.typecode != "q":
                if isinstance(tokens, bytes | bytearray):  # of which an array takes eight for a number
                    raise TypeError(type(tokens).__name__)
                tokens = array("q", tokens)
            self._data += tokens  # as bytes
        except (TypeError, OverflowError) as error:
            raise ArgumentError("tokens", "ids, signed 64-bit integers", str(error)) from error
        # Blocks that it may take. Its last token is in none: that one is always computed.
        self._most = (len(self) - 1) // self._cache.block_size

    def _find(self) -> bool:
        """Go on to the last block whose keys and values are there; whether another text has promised the one
        behind it."""
        cache = self._cache
        if self._drops != cache._drops:
            if self._blocks:
                self._blocks, self._place, self._next = [], self._runs.origin, None
            self._drops, self._epoch = cache._drops, cache._epoch
        # Most texts are new, and are asked for in several steps: their first block's key is made once.
        if self._blocks or self._is_lost or self._next is None or self._next in self._runs.by_key:
            at = self._place, self._data, len(self._blocks), self._most, self._extra
            found, self._place, self._next, self._is_lost = self._runs.find(*at)
            self._blocks += found
        return self._next in cache._promised

    def known(self) -> list[int]:
        """The blocks that hold its first tokens, full ones, that of its last token among them; not held
        for the caller."""
        most = len(self) // self._cache.block_size
        return self._runs.find(self._runs.origin, self._data, 0, most, self._extra)[0]

    def num_shared(self) -> int:
        """How many of its first blocks other texts hold, or are computing, or are pinned: they cost none of
        the blocks that are free and not pinned. 0 once it has begun."""
        if self.has_begun:
            return 0
        promised = self._num_promised() if self._find() else 0
        return promised + (self._num_costing_nothing(self._blocks) if self._blocks else 0)

    def _num_promised(self) -> int:
        """How many of its blocks from `_next` on the text computes that has promised this one; 0: none."""
        other: CachedText | None = None if self._next is None else self._cache._promised.get(self._next)
        if other is None:
            return 0
        place = len(self._blocks)  # as that of the other text's block: the same blocks are in front
        end = min(self._most, other._promised_end)
        return num_alike(other._data, place, self._data, place, end, self._runs.step)

    def _num_costing_nothing(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks`` are none of those that are free and not pinned."""
        return len(blocks) - self._cache.pool.idle.num_unpinned(blocks)

    def take(self, *, counts: bool = True, swapped: bool = False) -> list[int] | None:
        """The blocks that hold its first tokens, as many as are known, one holder more each; never that of
        its last token. None: another text has promised the one that would be next; ask again. Blocks that the
        host has are allocated, and on their way (`arrival`).

        Args:
            counts: whether the statistics hear of it; False: of a request that they have heard of.
            swapped: what the host has comes back, even where its tokens would be computed sooner.
        """
        return None if self._find() else self._begin(len(self._blocks), counts)

    def _begin(self, count: int, counts: bool, why_fewer: str = "") -> list[int]:
        """Take ``count`` of the blocks that were found; ``why_fewer``: why no more."""
        blocks = self._cache.pool.fork_kept(self._blocks[:count]) if count else []
        if count < len(self._blocks):
            self._place = self._runs.find(self._runs.origin, self._data, 0, count, self._extra)[1]
        self._done, self.has_begun = count, True
        if counts:
            self._count_tokens(count, why_fewer)
        return blocks

    def _count_tokens(self, count: int, why_fewer: str) -> None:
        stats, size, length = self._cache.stats, self._cache.block_size, len(self)
        stats.queried_tokens += length
        count += self.num_arriving
        stats.hit_tokens += count * size
        found, tail = (len(self._blocks) + self.num_arriving) * size, length - self._most * size
        why = NEW if self._next is None else self._cache._reasons.get(self._next, NEW)
        why = EVICTED if self._is_lost else why
        missed = (TAIL, tail), (why, length - tail - found), (why_fewer, found - count * size)
        for reason, tokens in missed:
            if tokens:
                stats.missed_tokens[reason] = stats.missed_tokens.get(reason, 0) + tokens

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
        if self._done < self._promised_end:  # behind what others have left there
            at = self._place, self._data, self._done, self._promised_end, self._extra
            self._promise = self._runs.find(*at)[2]
        if self._promise is not None:
            promised.setdefault(self._promise, self)

    def computed(self, num_tokens: int, blocks: Sequence[int]) -> None:
        """Its first tokens have their keys and values: others find them from now on.

        Call it when what writes them is launched, in the order of the stream, and did not fail.

        Args:
            num_tokens: how many.
            blocks: its blocks, held by the caller.

        Raises:
            ArgumentError: a block that is free, or known by other tokens.
        """
        cache, runs = self._cache, self._runs
        if self._epoch != cache._epoch:  # what it took may be of other weights
            return
        if not self.has_begun:
            self._place, self.has_begun = runs.origin, True
        end = min(num_tokens, len(self)) // cache.block_size
        if self._done >= end:
            return
        while (at := self._done) < end:
            run, place, count, key = runs.follow(self._place, self._data, at, end, self._extra)
            if key is not None:
                count = end - at
                tokens = self._data[at * runs.step : end * runs.step]
                self._place = runs.append(key, tokens, blocks[at:end])
            else:  # known to others, too, or known before
                runs.fill(run, place, blocks[at : at + count])
                self._place = run, place + count - 1
            self._done = at + count
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
        cache, runs, front, at = self._cache, self._runs, self._runs.origin, 0
        done = self._done if self._epoch == cache._epoch else 0
        blocks = list[int]()
        while at < done:
            run, place, count, key = runs.follow(front, self._data, at, done, self._extra)
            if key is not None:
                break
            if cache.host is not None:
                for n in range(count):
                    cache.host.drop((run, place + n))
            # Places that are not known any more were another text's, given up.
            blocks += [block for block in run.blocks[place : place + count] if block]
            front, at = (run, place + count - 1), at + count
        blocks.reverse()  # the last first: see `Run.lose`
        cache._forgotten(blocks, cache.pool._kept)
        cache._not_saved.difference_update(blocks)
        if done:  # one that computes the first block again finds nothing behind it
            key = runs.key(runs.origin, self._data, 0, self._extra)
            runs.by_key.pop(key, None)
            cache._note(key, "failed")
        self.leave()
        with ExitStack() as drops:  # of all, whatever an eviction policy raises
            for block in reversed(blocks):
                drops.callback(cache.pool.drop, block)

    def leave(self) -> None:
        """It computes nothing more: requests that wait for blocks that it promised compute these themselves.
        Before its blocks are freed."""
        if self._promised_end:
            self._promised_end = 0
            self._promise_next()
        self._epoch, self.has_begun = -1, True


class TieredText(CachedText):
    """See `CachedText`."""

    _is_counted = False

    def take(self, *, counts: bool = True, swapped: bool = False) -> list[int] | None:
        """See `CachedText`."""
        cache, host = self._cache, self._cache.host
        if self._find() or host is None:
            return None
        blocks = self._begin(len(self._blocks), counts=False)
        cache._not_saved.difference_update(blocks)
        blocks += self._bring(host, swapped)
        self._is_counted = counts
        if counts:
            self._count_tokens(len(self._blocks), "")
        return blocks

    def _bring(self, host: HostTier, always: bool) -> list[int]:
        """Blocks for the copies that the host has of what is behind those that were found; they are on their
        way."""
        cache, pool, runs = self._cache, self._cache.pool, self._runs
        places, following, front = list[Place](), [self._next], self._place
        for at in range(len(self._blocks), self._most):
            run, place, count, _ = runs.follow(front, self._data, at, at + 1, self._extra)
            if not count or run.block(place) or following[-1] in cache._promised:
                break
            front = run, place
            if not places and host.has(front):
                host.flush()  # what is found has a slot then; this one may have lost its own
            if not host.has(front):
                break
            places.append(front)
            more = at + 1 < self._most
            following.append(runs.key(front, self._data, at + 1, self._extra) if more else None)
        room = pool.num_unpinned
        count = host.worth_loading(places[:room], cache.block_size, always) if places and room else 0
        if not count:
            return []
        own = pool.allocate(count)
        self.num_arriving = count
        self.arrival = host.load(places[:count], own, self._tell)
        self._next = following[count]
        if self._next is not None:
            at = len(self._blocks) + count
            behind = runs.follow(places[count - 1], self._data, at, at + 1, self._extra)
            self._is_lost = behind[-1] is None
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
