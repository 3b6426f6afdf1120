"""What must be true of one cache's blocks after every operation."""

import random
from collections import Counter
from collections.abc import Iterable

import numpy
from tiered_engine import check_slots

from torchpaged.cache import BlockPool, PrefixCache, requests
from torchpaged.cache.host_tier import HostTier
from torchpaged.cache.requests import CacheRequests

NULL_WORD = -1.0  # what the null block holds


def row_holders(groups: Iterable[CacheRequests]) -> Counter[int]:
    """How many holders the pool has of each block of these rows; those of a chunk have one."""
    found, sharers = Counter[int](), Counter[int]()
    chunks: dict[int, tuple[list[int], list[int]]] = {}
    for rows in groups:
        assert len(rows._holds) == len(rows.block_tables)
        for table, length, holds in zip(rows.block_tables, rows.seq_lens, rows._holds, strict=True):
            size = requests.CHUNK
            for place, chunk in enumerate(holds._chunks):
                blocks = table[place * size : (place + 1) * size]
                assert (place + 1) * size <= length // rows.block_size, "a block that is written into"
                assert chunks.setdefault(id(chunk), (chunk, blocks))[1] == blocks
                sharers[id(chunk)] += 1
            found.update(table[len(holds._chunks) * size :])
    for number, (chunk, blocks) in chunks.items():
        assert chunk == [sharers[number]]
        found.update(blocks)
    return found


class Books:
    """A cache, and what its holders say that they have.

    Attributes:
        size: tokens per block.
        words: what blocks hold, ``[num_blocks, size]``; NaN where nothing holds a block.
        rows: rows of `CacheRequests`, and what is read through their tables.
        others: blocks that are held, and not read.
        requests: texts that have begun.
        forgot: whether the last operation made the prefix cache forget.
        host: where what is given up goes; None: it is lost.
        r: draws.
    """

    size: int
    pool: BlockPool
    prefixes: PrefixCache
    words: numpy.ndarray
    rows: list[tuple[CacheRequests, list[list[float]]]]
    others: list[list[int]]
    requests: list
    forgot: bool
    host: HostTier | None
    r: random.Random

    def flush(self) -> None:
        """Before something is written: what the pool gave up goes to the host."""
        if self.host is not None:
            self.host.flush()

    def settle(self) -> None:
        """Nothing is on its way, and what free blocks held is gone."""
        self.flush()
        self.words[self.pool._free] = numpy.nan
        if self.host is not None:
            check_slots(self.host)
            assert not self.host._queue

    def texts(self) -> list[tuple[list[int], list[float]]]:
        """All tables, and what must be read through them."""
        raise NotImplementedError

    def pins_and_idle(self) -> tuple[set[int], set[int]]:
        idle = self.pool.idle
        assert 0 <= self.pool.num_pinned <= len(self.pool.idle)
        pinned = {block for block in idle if not idle.num_unpinned([block])}
        return pinned, set(idle) - pinned

    def check(self, pinned: set[int], unpinned: set[int]) -> None:
        """Everything agrees with everything else.

        Args:
            pinned, unpinned: idle blocks before the operation.
        """
        if self.r.random() < 0.5:  # else what was given up is still on its way to the host
            self.settle()
        self._check_pool()
        self._check_content()
        self._check_prefixes()
        if not self.forgot and pinned - self.pool._kept.keys():
            assert not unpinned & set(self.pool.idle), "a pinned block went before one that was not"

    def _check_pool(self) -> None:
        pool, tables = self.pool, [table for table, _ in self.texts()] + self.others
        assert all(len(set(table)) == len(table) for table in tables), "a block twice"
        rows = {id(table) for group, _ in self.rows for table in group.block_tables}
        holders = Counter(block for table in tables if id(table) not in rows for block in table)
        holders += row_holders(group for group, _ in self.rows)
        assert holders[0] == 0, "the null block was given"
        counts = {block: pool.ref_count(block) for block in range(1, pool.num_blocks)}
        assert {block: count for block, count in counts.items() if count} == holders
        free, idle = set(pool._free), set(pool.idle)
        assert len(free) == len(pool._free)
        assert free | idle == set(range(1, pool.num_blocks)) - holders.keys()
        assert not free & idle
        assert idle == pool._kept.keys() - holders.keys()
        assert self.prefixes.keeps or not idle
        assert (pool.num_free, pool.num_used) == (len(free) + len(idle), len(holders))
        assert pool.num_used <= pool.peak_used <= pool.num_usable
        for rows, texts in self.rows:
            assert rows.seq_lens == [len(text) for text in texts]
            reserved = [-(-length // self.size) for length in rows.seq_lens]
            assert [len(table) for table in rows.block_tables] == reserved, "more than their tokens take"

    def _check_content(self) -> None:
        useful = set()
        for table, text in self.texts():
            read = self.words[table].reshape(-1)[: len(text)].tolist()
            assert read == text, f"{read} for {text}"
            useful.update(
                table[place // self.size] * self.size + place % self.size for place in range(len(text))
            )
        assert len(useful) <= self.pool.num_used * self.size
        assert (self.words[0] == NULL_WORD).all()

    def _check_prefixes(self) -> None:
        pool, cache = self.pool, self.prefixes
        known = {block: run for run in {*pool._kept.values()} for block in run.blocks if block}
        assert pool._kept == known, "a block in two runs, or in none"
        for key, run in cache._runs.by_key.items():
            front, place, _, tokens = run.key
            assert key == run.key
            assert run.tokens.startswith(tokens)
            assert not front.tokens.startswith(tokens, (place + 1) * cache._runs.step), (
                "one place has two runs"
            )
        for run in {*pool._kept.values(), *cache._runs.by_key.values()}:
            assert len(run.blocks) <= len(run.tokens) // cache._runs.step
            assert not run.blocks or run.blocks[-1]
        assert cache._runs.num_lost < pool.num_blocks + (0 if self.host is None else self.host.num_slots)
        assert set(cache._promised.values()) <= {one.text for one in self.requests}
        stats = cache.stats
        assert stats.queried_tokens == stats.hit_tokens + sum(stats.missed_tokens.values())
