"""CheckpointedPrefixCache: a `PrefixCache` for layers in which a request has more than blocks: a state,
which is that of its last token alone, or a ring, which has the last window.

Blocks that are known do not suffice there: a text goes on behind them only from a copy of what a request had
besides at that place, a checkpoint. It belongs to the block in front of it and goes with it, or before, when
checkpoints are short: of those that were made on the way and never used the oldest, of the same text if that
has two; else the one used longest ago. A text that finds blocks takes those up to its last checkpoint, and
its own copy of the first, by which its request is known (`torchpaged.hf.step_rings`).

Checkpoints are made where prompts' chunks end, on a block's border: about every so many tokens; where a text
found blocks and no checkpoint behind them (the end of what texts share, as in Marconi,
https://arxiv.org/abs/2411.19379); and where others wait for what a text computes. The last two cost a chunk
each, and only texts that share pay for them. Host data only.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from torchpaged.cache.block_pool import BlockPool
from torchpaged.cache.cached_text import CachedText
from torchpaged.cache.eviction import EvictionPolicy
from torchpaged.cache.prefix_books import EVICTED, Resumed
from torchpaged.cache.prefix_cache import PrefixCache
from torchpaged.cache.runs import Run
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import counted

#: Why known blocks were not taken: no checkpoint was made behind them, or it was given up for another.
NO_CHECKPOINT, CHECKPOINT_EVICTED = "no checkpoint", "checkpoint evicted"
#: The end of what texts share gets a checkpoint if it saves the next one this part of the usual distance.
_WORTH_A_CHUNK = 16


class CheckpointedPrefixCache(PrefixCache):
    """What blocks hold, and behind which there is a checkpoint.

    Args:
        pool, block_size, keep, eviction: as for `PrefixCache`.
        num_checkpoints: places for checkpoints, numbered from 0; at least 1.
        every: tokens between two checkpoints of a text, about; a multiple of ``block_size``.

    Raises:
        ArgumentError: as `PrefixCache`, and for these two.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        num_checkpoints: int,
        every: int,
        keep: bool = True,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        check_sizes(num_checkpoints=num_checkpoints, every=every)
        if every % block_size:
            raise ArgumentError("every", f"a multiple of the block size, {block_size}", str(every))
        super().__init__(pool, block_size, keep=keep, eviction=eviction)
        self.every, self.num_checkpoints = every, num_checkpoints
        self._of_block: OrderedDict[int, int] = OrderedDict()  # checkpoints, that used longest ago first
        self._unused: OrderedDict[int, None] = OrderedDict()  # blocks of those made on the way, oldest first
        self._evicted: set[int] = set()  # known blocks whose checkpoints were given up
        self._coming: dict[int, CheckpointedText] = {}  # known blocks -> the text with a checkpoint there
        self._free_all()

    def _free_all(self) -> None:
        self._free = list(range(self.num_checkpoints - 1, -1, -1))
        for books in (self._of_block, self._unused, self._evicted, self._coming):
            books.clear()

    def _facts(self) -> list[str]:
        kept = f"{len(self._of_block)} of {counted(self.num_checkpoints, 'checkpoint')} kept"
        return [*super()._facts(), kept]

    @property
    def checkpoints(self) -> dict[int, int]:
        """Those that are kept, by the block in front of each."""
        return dict(self._of_block)

    def clear(self, reason: str) -> None:
        """See `PrefixCache`."""
        super().clear(reason)
        self._free_all()

    def _forgotten(self, blocks: list[int], run_of: dict[int, Run]) -> list[tuple[Run, int, list[int]]]:
        self._evicted.difference_update(blocks)
        for block in blocks:
            self._coming.pop(block, None)
            self._unused.pop(block, None)
            if block in self._of_block:
                self._free.append(self._of_block.pop(block))
        return super()._forgotten(blocks, run_of)

    def _add(self, block: int, made: list[int] | None) -> int:
        """A place for the checkpoint behind ``block``; ``made``: blocks behind which its text has made others
        on the way; None: it is not one of them."""
        if not self._free:
            own = [other for other in made or () if other in self._unused]
            evicted = own[0] if len(own) > 1 else next(iter(self._unused or self._of_block))
            self._unused.pop(evicted, None)
            self._evicted.add(evicted)
            self._free.append(self._of_block.pop(evicted))
            self.stats.evicted_checkpoints += 1
        self._evicted.discard(block)
        self._of_block[block] = self._free.pop()
        if made is not None:
            self._unused[block] = None
            made.append(block)
        self.stats.checkpoints += 1
        return self._of_block[block]

    def _resumable(self, blocks: Sequence[int]) -> int | None:
        """How many of these first blocks of a text can be taken: those up to the last checkpoint. None: a
        text that computes is about to make a later one."""
        for count in range(len(blocks), 0, -1):
            if blocks[count - 1] in self._coming:
                return None
            if blocks[count - 1] in self._of_block:
                return count
        return 0


class CheckpointedText(CachedText):
    """The text of one request. Made by `CheckpointedPrefixCache.text`."""

    _cache: CheckpointedPrefixCache

    def __init__(self, cache: CheckpointedPrefixCache, tokens: Sequence[int], extra: Hashable) -> None:
        super().__init__(cache, tokens, extra)
        self._shared = 0  # blocks at whose end what it shares with others ends
        self._kept = 0  # tokens in front of its last checkpoint
        self._made: list[int] = []  # blocks behind which it made one on its way
        self._wanted = set[int]()  # numbers of its blocks behind which others wait for a checkpoint

    def num_shared(self) -> int:
        """See `CachedText`; without the first block, of which it has its own copy."""
        shared = super().num_shared()
        count = self._cache._resumable(self._blocks) if shared else 0
        if not shared or count is None or self._next in self._cache._promised:
            return max(shared - 1, 0)
        return self._num_costing_nothing(self._blocks[1:count])

    def take(self, *, counts: bool = True, swapped: bool = False) -> list[int] | None:
        """See `CachedText`. The first block is its own, and `resumes` says what is to be copied at once, in
        the order of the stream. None, too: another text is about to make a checkpoint that it could take."""
        cache, pool = self._cache, self._cache.pool
        if self._find():
            self._want()
            return None
        count = cache._resumable(self._blocks)
        if count is None:
            return None
        taken = count - self._num_costing_nothing(self._blocks[:count])
        if count and pool.num_unpinned <= taken:  # none is left for the copy
            count, why_fewer = 0, EVICTED
        else:
            behind = self._blocks[count:]
            why_fewer = CHECKPOINT_EVICTED if cache._evicted.intersection(behind) else NO_CHECKPOINT
        self._kept = count * cache.block_size
        worth = cache.every // (_WORTH_A_CHUNK * cache.block_size)
        if len(self._blocks) - count >= max(worth, 1):
            self._shared = len(self._blocks)
            cache._coming[self._blocks[-1]] = self
        blocks = self._begin(count, counts, why_fewer)
        if blocks:
            cache._of_block.move_to_end(blocks[-1])
            cache._unused.pop(blocks[-1], None)
            first = blocks[0]
            self.resumes = Resumed(cache._of_block[blocks[-1]], first)
            blocks[:1] = pool.allocate(1)
            pool.free([first])
        return blocks

    def _want(self) -> None:
        """The request that computes what it waits for shall make a checkpoint where that ends."""
        other = None if self._next is None else self._cache._promised.get(self._next)
        if isinstance(other, CheckpointedText):
            other._wanted.add(len(self._blocks) + self._num_promised())

    def _ends(self) -> list[int]:
        """Numbers of tokens behind which a checkpoint is due."""
        return [place * self._cache.block_size for place in (*self._wanted, self._shared)]

    def chunk(self, num_computed: int, most: int) -> int:
        """See `CachedText`: up to the next checkpoint, or a block's border, before the last token."""
        size, end = self._cache.block_size, num_computed + most
        last = self._most * size
        if self._epoch != self._cache._epoch or num_computed >= last:
            return most
        due = [n for n in (*self._ends(), self._kept + self._cache.every) if num_computed < n <= last]
        end = min([end, *due])
        if end < len(self) and end // size * size > num_computed:
            end = end // size * size
        return end - num_computed

    def checkpoint(self, num_tokens: int) -> int | None:
        """See `CachedText`: the number of a checkpoint."""
        cache, ends = self._cache, self._ends()
        place, rest = divmod(num_tokens, cache.block_size)
        if rest or self._epoch != cache._epoch or self._done != place or not 0 < place <= self._most:
            return None
        on_the_way = num_tokens not in ends
        if on_the_way and num_tokens - self._kept < cache.every // 2:
            return None
        self._kept = num_tokens
        self._answer(num_tokens)
        run, last = self._place
        block = run.block(last)
        if not block or block in cache._of_block:
            return None
        return cache._add(block, self._made if on_the_way else None)

    def _answer(self, num_tokens: int | None = None) -> None:
        """Requests wait no longer for its checkpoint behind so many tokens; None: for any of them."""
        coming, size = self._cache._coming, self._cache.block_size
        for block, text in list(coming.items()):
            if text is self and (num_tokens is None or num_tokens >= self._shared * size):
                del coming[block]
        self._wanted = {n for n in self._wanted if num_tokens not in (None, n * size)}

    def leave(self) -> None:
        """See `CachedText`."""
        self._answer()
        super().leave()


CheckpointedPrefixCache._TEXT = CheckpointedText
