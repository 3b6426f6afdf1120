"""PrefixBooks: what the blocks of a pool hold (`Runs`), what texts promise to compute, and counters.
`torchpaged.cache.PrefixCache` is what users have of it, and `CachedText` moves through it. Host data only.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchpaged.cache.block_pool import BlockPool
from torchpaged.cache.eviction import EvictionPolicy, check_policy
from torchpaged.cache.host_tier import HostTier
from torchpaged.cache.runs import TOKEN_BYTES, Key, Run, Runs
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import NotCopied
from torchpaged.custom_ops.words import counted, one_line, repr_of_fields

#: Why tokens were not found: they were new; the pool needed their blocks; they fill no block, or are
#: the last block of a text, whose last token is always computed since its logits are wanted.
NEW, EVICTED, TAIL = "new", "evicted", "tail"


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

    __repr__ = repr_of_fields


class Resumed(NamedTuple):
    """What a text goes on from besides the blocks that it took, see `torchpaged.cache.checkpoints`.

    Attributes:
        checkpoint: of its state.
        first_block: the one that its own first block is to be a copy of.
    """

    checkpoint: int
    first_block: int


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
        num_slots = 0 if host is None else host.num_slots
        self._runs = Runs(pool, block_size * TOKEN_BYTES, remembered=pool.num_blocks + num_slots)
        self._promised: dict[Key, Any] = {}  # the `CachedText` that computes the block behind a place
        self._reasons: dict[Key, str] = {}  # why texts that begin with a key are not known any more
        self._drops = 0  # another one when blocks are not known any more
        self._epoch = 0  # times that all were forgotten

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
        for key, run in self._runs.by_key.items():
            if key[0] is self._runs.origin[0]:
                self._note(key, reason if run.block(0) else EVICTED)
        self._runs.clear()
        self._promised.clear()
        self._not_saved.clear()  # of what the blocks held
        if self.host is not None:
            self.host.clear()
        self._drops, self._epoch = self._drops + 1, self._epoch + 1
        self.pool.drop_all()

    def _given_up(self, blocks: list[int], run_of: dict[int, Run]) -> None:
        """The pool needs ``blocks`` of these runs, or they have no holders and nothing is kept."""
        host, not_saved = self.host, self._not_saved
        for run, end, lost in self._forgotten(blocks, run_of):
            if host is not None:
                for place, block in zip(range(end - 1, -1, -1), lost, strict=False):
                    if block not in not_saved:
                        self._runs.num_lost -= host.has((run, place))  # it takes no other copy's slot
                        host.save((run, place), block)
            elif not self.keeps:
                self._runs.cut(run)
        if self.keeps:
            self.stats.evicted_blocks += len(blocks)
        if host is not None:
            not_saved.difference_update(blocks)

    def _forgotten(self, blocks: list[int], run_of: dict[int, Run]) -> list[tuple[Run, int, list[int]]]:
        """What ``blocks`` of these runs hold is not known any more; as `Runs.lose`."""
        self._drops += 1
        return self._runs.lose(blocks, run_of)

    def _note(self, key: Key, reason: str) -> None:
        """Why texts that begin with ``key`` are not known any more, of as many as the pool has blocks at
        most."""
        if len(self._reasons) >= self.pool.num_blocks:
            del self._reasons[next(iter(self._reasons))]
        self._reasons[key] = reason
