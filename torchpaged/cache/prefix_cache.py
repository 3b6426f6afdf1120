"""PrefixCache: full blocks of texts seen before, by their tokens, for texts that begin alike.

    cache = PrefixCache(BlockPool(1024), block_size=16)
    text = cache.text(tokens)                        # of one request
    blocks = text.take() or []                       # what is known of its first tokens, held once more
    blocks += cache.pool.allocate(-(-len(tokens) // 16) - len(blocks))
    text.computed(len(tokens), blocks)               # their keys and values are written: others find them
    text.leave(); cache.pool.free(blocks)            # kept until the pool needs the blocks for others

A block is known by its own tokens and by all before it: its key is the name of the block before it and the
bytes of its tokens, and each key has a name of its own, a number that no other had. So nothing rests on a
hash: keys are compared byte by byte (Python's dict does), no collision gives another text's keys and values,
and no texts can be made that collide.

When the pool runs dry it gives up the block that was left longest ago, the last of a text first, or the one
that an `EvictionPolicy` says; what is pinned goes last. Looking up, publishing and giving up a block cost
O(1). Host data only.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torchpaged.cache.block_pool import NULL_BLOCK, BlockPool
from torchpaged.cache.eviction import EvictionPolicy, Pin, check_policy
from torchpaged.cache.host_blocks import Arrival
from torchpaged.cache.host_tier import HostTier
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError, NotCopied

#: Why tokens were not found: they were new; the pool needed their blocks; they fill no block, or are
#: the last block of a text, whose last token is always computed since its logits are wanted.
NEW, EVICTED, TAIL = "new", "evicted", "tail"
_TOKEN_BYTES = 8


@dataclass
class PrefixCacheStats:
    """Counters of a `PrefixCache`. ``queried_tokens`` are ``hit_tokens`` and all of ``missed_tokens``.

    Attributes:
        queried_tokens: of texts that asked for what is known.
        hit_tokens: those that were known.
        missed_tokens: the others by the reason why a hit ended where it did: "new", they had not been
            computed; "evicted", the pool needed the blocks, so that a larger one would have had them; "tail",
            they fill no block, or are the block with a text's last token, which is always computed; what
            `PrefixCache.clear` was told; and the two reasons of `torchpaged.cache.checkpoints`.
        evicted_blocks: blocks given up for other tokens.
        host_tokens: brought back from the host, for requests that were put back as well.
        checkpoints, evicted_checkpoints: kept so far, and given up for others.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    missed_tokens: dict[str, int] = field(default_factory=dict)
    evicted_blocks: int = 0
    host_tokens: int = 0
    checkpoints: int = 0
    evicted_checkpoints: int = 0


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


class PrefixCache(NotCopied):
    """What the blocks of a pool hold, by tokens.

    Args:
        pool: of the blocks; it gives up what they hold when it needs them.
        block_size: tokens per block.
        keep: False: blocks without holders are given up at once, so that only texts that are there at the
            same time share.
        eviction: which of the blocks without holders is given up first; None: the one left longest ago
            (`LRU`).
        host: where copies of blocks go that the pool gives up; None: they are lost.

    Attributes:
        stats: counters.

    Raises:
        ArgumentError: a block size below 1, the pool has another cache, or ``eviction`` is no policy.
        NotCopyableError: it is copied or pickled.
    """

    _TEXT: type[CachedText]
    BOUND, ADVICE = "it says what the blocks of one pool hold", "make a new one of the copied pool"

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
        self._table: dict[Hashable, int] = {}  # blocks by key
        self._keys: list[Hashable] = [None] * pool.num_blocks  # of what is in `_table`, by block
        self._names = [b""] * pool.num_blocks  # with which the keys behind a block begin
        self._promised: dict[Hashable, bytes] = {}  # names of what texts compute, by key
        self._lost: OrderedDict[Hashable, tuple[bytes | None, str]] = OrderedDict()  # name and why, by key
        self._last_name = 0
        self._version = 0  # another one when what is known or held may have changed
        self._drops = 0  # blocks that are not known any more
        self._epoch = 0  # times that all were forgotten

    def __len__(self) -> int:
        """Blocks whose tokens are known."""
        return len(self._table)

    def text(self, tokens: Sequence[int], extra: Hashable = None) -> CachedText:
        """One request's text; nothing is held yet.

        Args:
            tokens: ids, signed 64-bit integers. Where keys and values depend on more than ids, as behind an
                image, put ids in the place of its tokens that stand for its content: a hash of it.
            extra: what else they depend on, or who may know of them: an adapter's name, a tenant's salt.
                Texts share with those of an equal one only.

        Raises:
            ArgumentError: tokens that are no such integers, or an ``extra`` that can't be hashed.
        """
        try:
            hash(extra)
        except TypeError as error:
            raise ArgumentError("extra", "something that can be hashed", repr(extra)) from error
        return self._TEXT(self, tokens, extra)

    def pin(
        self,
        tokens: Sequence[int],
        extra: Hashable = None,
        *,
        ttl: float | None = None,
        priority: int = 0,
    ) -> Pin:
        """Give up what is known of a text's first tokens after all that is not pinned: a system prompt. No
        memory is taken from requests that need it: pinned blocks without holders count as free.

            pin = cache.pin(system_prompt, ttl=3600)
            print(pin.num_tokens, "tokens of it are known")
            cache.unpin(pin)

        Args:
            tokens, extra: as of `text`; all of their full blocks that are known by now.
            ttl: seconds until it ends by itself; None: `unpin` ends it, or `clear`.
            priority: of pinned blocks those of lower priority go first. Those of several pins have the
                highest of these.

        Raises:
            ArgumentError: as `text`, a ``ttl`` or ``priority`` that can't be, or nothing is kept.
        """
        if not self.keeps:
            raise ArgumentError("keep", "True for pins: blocks without holders are given up at once", "False")
        blocks = self.text(tokens, extra).known()
        self._version += 1
        return self.pool.pin(blocks, len(blocks) * self.block_size, ttl, priority)

    def unpin(self, pin: Pin) -> None:
        """End a pin; nothing if it has ended."""
        self._version += 1
        self.pool.unpin(pin)

    def clear(self, reason: str) -> None:
        """Forget all blocks; those that are held stay so. Texts of before publish nothing any more.

        Args:
            reason: why, for `PrefixCacheStats.missed_tokens`.
        """
        for key in self._table:
            self._note(key, None, reason)
        self._table, self._promised = {}, {}
        self._keys = [None] * len(self._keys)
        self._not_saved.clear()  # of what the blocks held
        if self.host is not None:
            self.host.clear()
        self._version, self._drops, self._epoch = self._version + 1, self._drops + 1, self._epoch + 1
        self.pool.drop_all()

    # ---------------------------------------------------------------------------------------------- snapshots
    def known(self) -> list[tuple[KnownBlock, int]]:
        """What is known, and in which block, what is in front of a block before it. Blocks whose beginning
        was given up are left out: they are not found."""
        step, behind = self.block_size * _TOKEN_BYTES, dict[bytes, list[tuple[bytes, int]]]()
        found: list[tuple[KnownBlock, int]] = []
        for key, block in self._table.items():
            if isinstance(key, bytes) and len(key) > step:
                behind.setdefault(key[:-step], []).append((key[-step:], block))
            else:
                extra, tokens = key if isinstance(key, tuple) else (None, key)
                found.append((KnownBlock(-1, tokens, extra), block))
        for parent, (_, block) in enumerate(found):  # it grows meanwhile
            for tokens, child in behind.get(self._names[block], ()):
                found.append((KnownBlock(parent, tokens, None), child))
        return found

    def find(self, texts: Sequence[KnownBlock]) -> list[int | None]:
        """The blocks that hold these; None: unknown."""
        found: list[int | None] = []
        for text in texts:
            parent = found[text.parent] if text.parent >= 0 else NULL_BLOCK
            found.append(None if parent is None else self._table.get(self._key_of(text, parent)))
        return found

    def publish(self, texts: Sequence[KnownBlock], blocks: Sequence[int]) -> None:
        """Each of ``texts`` is in one of ``blocks``, which the caller holds: others find it from now on. What
        is known already stays where it is."""
        for text, block in zip(texts, blocks, strict=True):
            key = self._key_of(text, blocks[text.parent] if text.parent >= 0 else NULL_BLOCK)
            if key not in self._table:
                self._fill(key, block)

    def _key_of(self, text: KnownBlock, parent: int) -> Hashable:
        if text.parent >= 0:
            return self._names[parent] + text.tokens
        return text.tokens if text.extra is None else (text.extra, text.tokens)

    # ------------------------------------------------------------------------------------------- the books
    def _name(self, key: Hashable) -> bytes:
        """A name of this key alone: the one it had before, as long as that is remembered, so that what is
        behind it is found again."""
        if key in self._lost and (name := self._lost[key][0]) is not None:
            return name
        if self.host is not None and (name := self.host.name(key)) is not None:
            return name
        self._last_name = number = self._last_name + 1
        return number.to_bytes(8, "little")

    def _note(self, key: Hashable, name: bytes | None, reason: str) -> None:
        """Remember what is not known any more, and was until now, of as many blocks as the pool has."""
        self._lost[key] = name, reason
        if len(self._lost) > self.pool.num_blocks:
            self._lost.popitem(last=False)

    def _fill(self, key: Hashable, block: int) -> None:
        """Keys and values of ``key`` are in ``block``."""
        if self._keys[block] is not None:
            raise ArgumentError("blocks", "blocks of these tokens alone", f"block {block} of other tokens")
        self.pool.keep(block)
        name = self._promised.pop(key, None) or self._name(key)
        self._lost.pop(key, None)
        self._table[key], self._keys[block], self._names[block] = block, key, name
        self._version += 1

    def _given_up(self, block: int) -> None:
        """The pool needs ``block``, or it has no holder and nothing is kept."""
        key = self._forgotten(block)
        if self.keeps:
            self._note(key, self._names[block], EVICTED)
            self.stats.evicted_blocks += 1
        if self.host is not None and block not in self._not_saved:
            self.host.save(key, self._names[block], block)
        self._not_saved.discard(block)

    def save_none(self, blocks: Sequence[int]) -> None:
        """The host gets no copies of those of these without holders when they are given up, unless a text
        takes them before."""
        if self.host is not None:
            self._not_saved.update(block for block in blocks if block in self.pool._idle)

    def _forgotten(self, block: int) -> Hashable:
        """What ``block`` holds is not known any more; its key."""
        key = self._keys[block]
        del self._table[key]
        self._keys[block] = None
        self._version, self._drops = self._version + 1, self._drops + 1
        return key


class CachedText:
    """The text of one request in a `PrefixCache`. Made by `PrefixCache.text`.

    It knows places in the cache, and holds no block: those that `take` gives are the caller's.

    Attributes:
        has_begun: whether `take` gave blocks.
        resumes: what else is to be copied before it goes on behind these; None: nothing.
        arrival: of those blocks of `take` that are on their way from the host; None: none is.
        num_arriving: how many are, the last of them.
    """

    def __init__(self, cache: PrefixCache, tokens: Sequence[int], extra: Hashable) -> None:
        self._cache, self._extra, self._step = cache, extra, cache.block_size * _TOKEN_BYTES
        self._data = b""
        self.extend(tokens)
        self._epoch, self._drops = cache._epoch, cache._drops
        self._blocks: list[int] = []  # of its first tokens, found so far
        self._name = b""  # of the last of its blocks that is found, or computed
        self._next: Hashable = None  # the key that was not found
        self._done = 0  # blocks that are taken, or computed
        self._last = NULL_BLOCK  # the one that is known by the tokens of the last block that was computed
        self._pending: dict[Hashable, bytes] = {}  # names by the keys that it promised
        self._ahead: list[tuple[bytes, Hashable]] = []  # from block `_done` at `promise` on: name before, key
        self._first = 0  # the place of the first of these
        self._counted, self._count = -1, 0
        self.has_begun = False
        self.resumes: Resumed | None = None
        self.arrival: Arrival | None = None
        self.num_arriving = 0

    def __len__(self) -> int:
        return len(self._data) // _TOKEN_BYTES

    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens follow, outputs for instance.

        Raises:
            ArgumentError: as `PrefixCache.text`.
        """
        try:
            self._data += array("q", tokens).tobytes()
        except (TypeError, OverflowError) as error:
            raise ArgumentError("tokens", "ids, signed 64-bit integers", str(error)) from error

    def _key(self, place: int, name: bytes) -> Hashable:
        """Of its block ``place``, behind one of this name."""
        tokens = self._data[place * self._step : (place + 1) * self._step]
        if place:
            return name + tokens
        return tokens if self._extra is None else (self._extra, tokens)

    @property
    def _most(self) -> int:
        """Blocks that it may take. Its last token is in none: that one is always computed."""
        return (len(self) - 1) // self._cache.block_size

    def _find(self) -> bool:
        """Go on to the last block whose keys and values are there; whether another text has promised the one
        behind it."""
        cache = self._cache
        if self._drops != cache._drops:
            self._blocks, self._name = [], b""
            self._drops, self._epoch = cache._drops, cache._epoch
        blocks, table = self._blocks, cache._table
        for place in range(len(blocks), self._most):
            self._next = self._key(place, self._name)
            block = table.get(self._next)
            if block is None:
                return self._next in cache._promised
            blocks.append(block)
            self._name = cache._names[block]
        self._next = None
        return False

    def known(self) -> list[int]:
        """The blocks that hold its first tokens, full ones, that of its last token among them; not held
        for the caller."""
        blocks, name = list[int](), b""
        for place in range(len(self) // self._cache.block_size):
            block = self._cache._table.get(self._key(place, name))
            if block is None:
                break
            blocks.append(block)
            name = self._cache._names[block]
        return blocks

    def num_shared(self) -> int:
        """How many of its first blocks other texts hold, or are computing, or are pinned: they cost none of
        the blocks that are free and not pinned. 0 once it has begun."""
        if self.has_begun or self._counted == self._cache._version:
            return 0 if self.has_begun else self._count
        waits, promised = self._find(), self._cache._promised
        self._count = sum(map(self._costs_nothing, self._blocks))
        place, key = len(self._blocks), self._next
        while waits and key in promised:
            self._count, place = self._count + 1, place + 1
            if place == self._most:
                break
            key = self._key(place, promised[key])
        self._counted = self._cache._version
        return self._count

    def _costs_nothing(self, block: int) -> bool:
        """Whether ``block`` is none of those that are free and not pinned."""
        pool = self._cache.pool
        return pool._ref_counts[block] > 0 or pool._idle.is_pinned(block)

    def take(self, *, counts: bool = True) -> list[int] | None:
        """The blocks that hold its first tokens, as many as are known, one holder more each; never that of
        its last token. None: another text has promised the one that would be next; ask again. Blocks that the
        host has are allocated, and on their way (`arrival`).

        Args:
            counts: whether the statistics hear of it; False: of a request that they have heard of.
        """
        cache = self._cache
        if (self._next is not None and self._next in cache._promised) or self._find():
            return None
        blocks = self._begin(len(self._blocks), counts and cache.host is None)
        if cache.host is not None:
            cache._not_saved.difference_update(blocks)
            blocks += self._bring(cache.host)
            if counts:
                self._count_tokens(len(self._blocks), "")
        return blocks

    def _bring(self, host: HostTier) -> list[int]:
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
        count = min(len(keys), pool.num_free - pool.num_pinned)
        if count <= 0 or not host.is_cheaper(count, cache.block_size):
            return []
        own = pool.allocate(count)
        self.arrival, self.num_arriving = host.load(keys[:count], own), count
        self._next = keys[count] if count < len(keys) else key
        cache.stats.host_tokens += count * cache.block_size
        return own

    def _begin(self, count: int, counts: bool, why_fewer: str = "") -> list[int]:
        """Take ``count`` of the blocks that were found; ``why_fewer``: why no more."""
        cache = self._cache
        blocks = cache.pool.fork(self._blocks[:count])
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
        return NEW if self._next is None else self._cache._lost.get(self._next, (None, NEW))[1]

    def promise(self) -> None:
        """Its further full blocks are going to be computed: until `leave`, texts that share them wait."""
        cache, name = self._cache, self._name
        table, promised, pending = cache._table, cache._promised, self._pending
        self._first, self._ahead = self._done, []
        for place in range(self._done, self._most):
            key = self._key(place, name)
            if key in promised:  # by others
                break
            self._ahead.append((name, key))
            if key in table:  # left behind by others
                name = cache._names[table[key]]
            else:
                name = promised[key] = pending[key] = cache._name(key)
        cache._version += 1

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
        table, names, ahead, name = cache._table, cache._names, self._ahead, self._name
        for place in range(self._done, min(num_tokens, len(self)) // cache.block_size):
            at = place - self._first
            if at < len(ahead) and ahead[at][0] == name:
                key = ahead[at][1]  # whose hash is known
            else:
                key = self._key(place, name)
            block = table.get(key)
            if block is None:
                block = blocks[place]
                cache._fill(key, block)
            name = names[block]
            self._last, self._name, self._done = block, name, place + 1

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
                again = cache._promised.get(key) or cache._lost.get(key, (None, ""))[0]
                if again is None:
                    break
                name = again
                continue
            name = cache._names[block]
            cache._note(cache._forgotten(block), None, "failed")
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


PrefixCache._TEXT = CachedText
