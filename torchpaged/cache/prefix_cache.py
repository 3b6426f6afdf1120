"""PrefixCache: full blocks of texts seen before, by their tokens, for texts that begin alike.

    cache = PrefixCache(BlockPool(1024), block_size=16)
    text = cache.text(tokens)                        # of one request
    blocks = text.take() or []                       # what is known of its first tokens, held once more
    blocks += cache.pool.allocate(-(-len(tokens) // 16) - len(blocks))
    text.computed(len(tokens), blocks)               # their keys and values are written: others find them
    text.leave(); cache.pool.free(blocks)            # kept until the pool needs the blocks for others

A block is known by its own tokens and by all before it. Blocks that follow each other are a run, which has
their tokens; where texts part, another run begins, which is known by its place behind the other and by its
first tokens. So nothing rests on a hash: tokens are compared byte by byte, no collision gives another text's
keys and values, and no texts can be made that collide.

When the pool runs dry it gives up the block that was left longest ago, the last of a text first, or the one
that an `EvictionPolicy` says; what is pinned goes last. Looking up, publishing and giving up cost O(1) per
run, and per block what it costs to compare or copy its tokens and number; giving up a block in the middle of
a run costs O(blocks of the run). Host data only.
"""

from collections.abc import Hashable, Sequence

from torchpaged.cache.cached_text import CachedText, TieredText
from torchpaged.cache.eviction import Pin
from torchpaged.cache.prefix_books import PrefixBooks
from torchpaged.custom_ops.errors import ArgumentError


class PrefixCache(PrefixBooks):
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

    _TEXT: type[CachedText] = CachedText

    def text(self, tokens: Sequence[int], extra: Hashable = None) -> CachedText:
        """One request's text; nothing is held yet.

        Args:
            tokens: ids, signed 64-bit integers. Where keys and values depend on more than ids, as behind an
                image, put ids in the place of its tokens that stand for its content: a hash of it.
            extra: what else they depend on, or which requests may share them: an adapter's name, a tenant's
            salt.
                Texts share with those of an equal one only.

        Raises:
            ArgumentError: tokens that are no such integers, or an ``extra`` that can't be hashed.
        """
        try:
            hash(extra)
        except TypeError as error:
            raise ArgumentError("extra", "something that can be hashed", repr(extra)) from error
        kind = self._TEXT if self.host is None else TieredText
        return kind(self, tokens, extra)

    def pin(
        self, tokens: Sequence[int], extra: Hashable = None, *, ttl: float | None = None, priority: int = 0
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
        return self.pool.idle.pin(blocks, len(blocks) * self.block_size, ttl, priority)

    def unpin(self, pin: Pin) -> None:
        """End a pin; nothing if it has ended."""
        self.pool.idle.unpin(pin)

    def save_none(self, blocks: Sequence[int]) -> None:
        """The host gets no copies of those of these without holders when they are given up, unless a text
        takes them before."""
        if self.host is not None:
            self._not_saved.update(block for block in blocks if block in self.pool.idle)
