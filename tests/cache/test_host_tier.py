"""Blocks that a pool gives up come back from the host with what they held: random operations over real pools,
each block's content known by its text; books after a copy that raises."""

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
from tiered_engine import SIZE, TieredEngine

from torchpaged.cache import BlockPool, PrefixCache
from torchpaged.cache.host_blocks import HostBlocks
from torchpaged.cache.host_tier import HostTier


@pytest.mark.parametrize("num_slots", [1, 5, 60])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_order_texts_come_in(seed: int, num_slots: int) -> None:
    draw, engine = random.Random(seed), TieredEngine(14, num_slots)
    systems = [[draw.randrange(1000) for _ in range(draw.randrange(4, 25))] for _ in range(5)]
    for turn in range(200):
        tokens = draw.choice(systems)[: draw.randrange(1, 30)] + [draw.randrange(3) for _ in range(6)]
        engine.run(tokens, draw.choice([None, "salt"]))
        if draw.random() < 0.02:
            engine.prefixes.clear("weights")
            assert len(engine.host) == 0
        if draw.random() < 0.1:
            engine.prefixes.save_none(list(engine.cache.pool.idle)[:3])
        if draw.random() < 0.05:
            failed = engine.prefixes.text(tokens)
            blocks = failed.take() or []
            failed.forget()
            engine.cache.pool.free(blocks)
        if turn == 100:
            engine.host.recompute_seconds = lambda: draw.choice([0.0, 1e9])
    assert engine.host.loaded_blocks > 0 or num_slots == 1
    assert engine.prefixes.stats.host_tokens == engine.host.loaded_blocks * SIZE


def test_a_second_copy_is_not_made() -> None:
    engine = TieredEngine(8, 20)
    one, other = list(range(17)), list(range(100, 125))
    engine.run(one)
    assert engine.run(other) == 0
    assert engine.run(one) == 4, "from the host"
    saved = engine.host.saved_blocks
    engine.run(other)
    assert engine.run(one) == 4
    assert engine.host.saved_blocks <= saved + 6, "those of the other text alone"
    stats = engine.prefixes.stats
    assert stats.queried_tokens == stats.hit_tokens + sum(stats.missed_tokens.values())


def test_what_is_faster_to_compute_stays_there() -> None:
    engine = TieredEngine(8, 20)
    one = list(range(17))
    engine.run(one)
    engine.run(list(range(100, 125)))
    engine.host.recompute_seconds = lambda: 0.0
    assert engine.run(one) < 4
    assert engine.prefixes.stats.missed_tokens["evicted"] > 0
    engine.host.recompute_seconds = lambda: float("inf")
    engine.run(list(range(100, 125)))
    assert engine.run(one) == 4


def test_who_shares_waits_for_what_is_on_its_way() -> None:
    engine = TieredEngine(12, 20)
    one = list(range(17))
    engine.run(one)
    engine.run(list(range(100, 141)))
    first, second = engine.prefixes.text(one), engine.prefixes.text(one)
    blocks = first.take()
    assert blocks is not None
    first.promise()
    assert first.num_arriving == 4 - len(first._blocks) > 0
    assert second.take() is None
    engine.host.flush()
    first.computed(16, blocks)
    assert second.take() == blocks
    engine.check(one, blocks, 4)


def test_a_forked_row_is_copied_behind_what_was_given_up() -> None:
    """Its own copy of a shared block goes where another text's was, whose copy to the host comes first."""
    engine, first = TieredEngine(5, 8), [*range(1, 9), 7]
    engine.run(first)
    rows = engine.cache.allocate(1)
    rows.append([5])
    fork = rows.fork()
    fork.append([1])  # gives up a block of the text
    assert engine.host.saved_blocks
    rows.free()
    fork.free()
    assert engine.run(first) == 2


def test_what_was_given_up_since_takes_the_slot_of_what_is_asked_for() -> None:
    engine, first = TieredEngine(5, 2), list(range(9))
    engine.run(first)
    engine.run(list(range(100, 116)))  # the first one is on the host now
    engine.cache.pool.allocate(2)  # takes its slots with the next flush
    assert engine.prefixes.text(first).take() == []


def test_a_copy_is_found_as_long_as_it_has_its_slot() -> None:
    """However often others, which have theirs, come and go meanwhile."""
    engine, first = TieredEngine(12, 40), list(range(17))
    engine.run(first)
    for turn in range(60):
        engine.run([turn % 4 + 100] * 17)
    assert engine.host.saved_blocks < 40
    assert engine.run(first) == 4


class Broken:
    num_slots, bytes_per_block = 8, 1

    def swap_out(self, blocks: Any, slots: Any) -> None: ...

    def swap_in(self, slots: Any, blocks: Any) -> None:
        raise RuntimeError("out of memory")


def test_a_copy_back_that_raises_loses_no_slots() -> None:
    tier = HostTier(cast(HostBlocks, Broken()))
    tier.save(1, 1)
    tier.flush()
    with pytest.raises(RuntimeError):
        tier.load([1], [2])
    tier.clear()
    assert len(tier._free) == 8


@pytest.mark.parametrize("forget", [HostTier.clear, lambda tier: tier.drop(1)])
def test_what_waits_for_its_copy_is_forgotten_with_the_copies(forget: Callable[[HostTier], None]) -> None:
    tier = HostTier(cast(HostBlocks, Broken()))
    tier.save(1, 1)
    forget(tier)
    assert not tier.has(1)
    tier.flush()
    assert tier.saved_blocks == 0


def test_what_was_not_to_be_saved_is_forgotten_with_the_rest() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, 2, host=HostTier(cast(HostBlocks, Broken())))
    assert cache.host is not None
    for start, saved in ((0, 0), (10, 0), (20, 3)):
        text, blocks = cache.text(range(start, start + 6)), pool.allocate(3)
        cache.host.flush()
        text.computed(6, blocks)
        text.leave()
        pool.free(blocks)
        if not start:
            cache.save_none(blocks)
            cache.clear("reset")
        assert cache.host.saved_blocks == saved
