"""PrefixCache: full blocks of texts seen before, by their tokens, for texts that begin alike.

    cache = PrefixCache(BlockPool(1024), block_size=16)
    text = cache.text(tokens)                        # of one request
    blocks = text.take() or []                       # what is known of its first tokens, held once more
    blocks += cache.pool.allocate(-(-len(tokens) // 16) - len(blocks))
    text.computed(len(tokens), blocks)               # their keys and values are written: others find them
    text.leave(); cache.pool.free(blocks)            # kept until the pool needs the blocks for others

A block is known by its own tokens and by all before it: a tree of blocks, each looked up among those behind
its parent by its tokens' bytes in a dict. Python's hash of bytes is short but keyed with a secret of the
process, and the dict compares the bytes themselves: no collision gives another text's keys and values, and
nobody can make texts that collide.

When the pool runs dry it gives up the block that was left longest ago, the last of a text first
(`BlockPool`). Looking up, publishing and giving up a block cost O(1). Host data only.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from torchpaged.cache.block_pool import BlockPool
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError, NotCopied

#: Why tokens were not found: nobody computed them; the pool needed their blocks; they fill no block, or are
#: the last block of a text, whose last token is always computed since its logits are wanted.
NEW, EVICTED, TAIL = "new", "evicted", "tail"
_TOKEN_BYTES = 8


@dataclass
class PrefixCacheStats:
    """Counters of a `PrefixCache`. ``queried_tokens`` are ``hit_tokens`` and all of ``missed_tokens``.

    Attributes:
        queried_tokens: of texts that asked for what is known.
        hit_tokens: those that were known.
        missed_tokens: the others by the reason why a hit ended where it did: "new", nobody had computed
            them; "evicted", the pool needed the blocks, so that a larger one would have had them; "tail",
            they fill no block, or are the block with a text's last token, which is always computed; what
            `PrefixCache.clear` was told.
        evicted_blocks: blocks given up for other tokens.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    missed_tokens: dict[str, int] = field(default_factory=dict)
    evicted_blocks: int = 0


class _Node:
    """A full block of tokens behind those of its parents.

    Attributes:
        key: its tokens.
        block: where its keys and values are; None while a text that promised them computes them.
        digest: of its tokens and all before; for reasons only, so that collisions do no harm.
        alive: whether it is still found.
    """

    __slots__ = ("alive", "block", "children", "digest", "key", "parent")

    def __init__(self, parent: _Node | None = None, key: Hashable = None) -> None:
        self.parent, self.key = parent, key
        self.digest: int = 0 if parent is None else hash((parent.digest, key))
        self.block: int | None = None
        self.children: dict[Hashable, _Node] = {}
        self.alive = True


class PrefixCache(NotCopied):
    """What the blocks of a pool hold, by tokens.

    Args:
        pool: of the blocks; it gives up what they hold when it needs them.
        block_size: tokens per block.
        keep: False: what nobody holds is given up at once, so that only texts that are there at the same time
            share.

    Attributes:
        stats: counters.

    Raises:
        ArgumentError: a block size below 1, or the pool has another cache.
        NotCopyableError: it is copied or pickled.
    """

    BOUND, ADVICE = "it says what the blocks of one pool hold", "make a new one of the copied pool"

    def __init__(self, pool: BlockPool, block_size: int, *, keep: bool = True) -> None:
        check_sizes(block_size=block_size)
        pool.watch(self._given_up, keep)
        self.pool, self.block_size, self.keeps = pool, block_size, keep
        self.stats = PrefixCacheStats()
        self._root = _Node()
        self._nodes: dict[int, _Node] = {}  # by block
        self._lost: OrderedDict[int, str] = OrderedDict()  # why, by digest
        self._version = 0  # another one when what may be known or held has changed

    def __len__(self) -> int:
        """Blocks whose tokens are known."""
        return len(self._nodes)

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
        return CachedText(self, tokens, extra)

    def clear(self, reason: str) -> None:
        """Forget all blocks; those that are held stay so. Texts of before publish nothing any more.

        Args:
            reason: why, for `PrefixCacheStats.missed_tokens`.
        """
        for node in self._nodes.values():
            self._note(node, reason)
        self._root, self._nodes = _Node(), {}
        self._version += 1
        self.pool.drop_all()

    # ---------------------------------------------------------------------------------------------- the tree
    def _note(self, node: _Node, reason: str) -> None:
        """Remember why a block is not known any more, for as many as the pool has."""
        self._lost.pop(node.digest, None)
        self._lost[node.digest] = reason
        if len(self._lost) > self.pool.num_blocks:
            self._lost.popitem(last=False)

    def _fill(self, node: _Node, block: int) -> None:
        """The node's keys and values are in ``block``."""
        if block in self._nodes:
            raise ArgumentError("blocks", "blocks of these tokens alone", f"block {block} of other tokens")
        self.pool.keep(block)
        node.block, self._nodes[block] = block, node
        self._version += 1

    def _given_up(self, block: int) -> None:
        self._drop(self._nodes[block], EVICTED if self.keeps else None)

    def _drop(self, node: _Node, reason: str | None) -> None:
        """Forget a node and all behind it."""
        if not node.alive:
            return
        assert node.parent is not None
        del node.parent.children[node.key]
        self._version += 1
        falling = [node]
        while falling:
            node = falling.pop()
            node.alive = False
            falling += node.children.values()
            node.children = {}
            if node.block is not None:
                del self._nodes[node.block]
                self.pool.drop(node.block)
                self.stats.evicted_blocks += reason == EVICTED
                if reason is not None:
                    self._note(node, reason)


class CachedText:
    """The text of one request in a `PrefixCache`. Made by `PrefixCache.text`.

    It knows places in the cache, and holds no block: those that `take` gives are the caller's.
    """

    def __init__(self, cache: PrefixCache, tokens: Sequence[int], extra: Hashable) -> None:
        self._cache, self._extra, self._step = cache, extra, cache.block_size * _TOKEN_BYTES
        self._data = b""
        self.extend(tokens)
        self._root = cache._root
        self._path = [self._root]  # of its first blocks, the root before them
        self._done = 0  # of these, those that hold keys and values
        self._counted, self._count = -1, 0
        self.has_begun = False  # whether `take` gave blocks

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

    def _key(self, place: int) -> Hashable:
        """Of its block ``place``."""
        key = self._data[place * self._step : (place + 1) * self._step]
        return key if place or self._extra is None else (self._extra, key)

    @property
    def _is_cut_off(self) -> bool:
        """Whether blocks that it took, or found, are not known any more."""
        return not self._path[-1].alive or self._root is not self._cache._root

    @property
    def _most(self) -> int:
        """Blocks that it may take. Its last token is in none: that one is always computed."""
        return (len(self) - 1) // self._cache.block_size

    def _find(self) -> _Node | None:
        """Go on to the last block whose keys and values are there; the node behind it, if another text has
        promised to compute that."""
        if self._is_cut_off:
            self._root = self._cache._root
            self._path = [self._root]
        path = self._path
        while len(path) <= self._most:
            child = path[-1].children.get(self._key(len(path) - 1))
            if child is None or child.block is None:
                return child
            path.append(child)
        return None

    def num_shared(self) -> int:
        """How many of its first blocks other texts hold, or are computing: they cost no further block. 0 once
        it has begun."""
        if self.has_begun or self._counted == self._cache._version:
            return 0 if self.has_begun else self._count
        promised, refs = self._find(), self._cache.pool._ref_counts
        self._count = sum(1 for node in self._path if node.block is not None and refs[node.block])
        for place in range(len(self._path), self._most + 1):
            if promised is None:
                break
            self._count += 1
            promised = promised.children.get(self._key(place))
        self._counted = self._cache._version
        return self._count

    def take(self) -> list[int] | None:
        """The blocks that hold its first tokens, as many as are known, one holder more each; never that of
        its last token. None: another text has promised the one that would be next; ask again."""
        if self._find() is not None:
            return None
        cache, path = self._cache, self._path
        blocks = cache.pool.fork([node.block for node in path if node.block is not None])
        self._done, self.has_begun = len(blocks), True
        cache._version += 1
        stats, hit = cache.stats, len(blocks) * cache.block_size
        stats.queried_tokens += len(self)
        stats.hit_tokens += hit
        tail = len(self) - self._most * cache.block_size
        missed = {TAIL: tail, self._why(): len(self) - tail - hit}
        for reason, count in missed.items():
            if count:
                stats.missed_tokens[reason] = stats.missed_tokens.get(reason, 0) + count
        return blocks

    def _why(self) -> str:
        """Why the block behind those that were found is not known."""
        digest = hash((self._path[-1].digest, self._key(len(self._path) - 1)))
        return self._cache._lost.get(digest, NEW)

    def promise(self) -> None:
        """Its further full blocks are going to be computed: until `leave`, texts that share them wait."""
        cache, path = self._cache, self._path
        while len(path) <= self._most:
            key = self._key(len(path) - 1)
            path.append(path[-1].children.setdefault(key, _Node(path[-1], key)))
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
        path = self._path
        full = min(num_tokens, len(self)) // self._cache.block_size
        while self._done < full and not self._is_cut_off:
            place = self._done
            if place + 1 == len(path):
                key = self._key(place)
                path.append(path[-1].children.setdefault(key, _Node(path[-1], key)))
            node = path[place + 1]
            if node.block is None and node.alive:
                self._cache._fill(node, blocks[place])
            self._done += 1

    def forget(self) -> None:
        """What it took and published is not to be trusted: nobody finds it any more."""
        if len(self._path) > 1 and not self._is_cut_off:
            self._cache._drop(self._path[1], "failed")

    def leave(self) -> None:
        """It computes nothing more: who waits for what it promised does so itself. Before its blocks are
        freed."""
        for node in self._path[self._done + 1 :]:
            if node.block is None and not self._is_cut_off:
                self._cache._drop(node, None)
                break
        self._path = self._path[:1]
        self.has_begun = True
        self._done = len(self)
        self._cache._version += 1
