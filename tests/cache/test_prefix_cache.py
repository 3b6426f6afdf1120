"""PrefixCache: what is found, held, waited for and given up; and any order of operations keeps the books."""

from __future__ import annotations

import random
from typing import Any

import pytest

from torchpaged import ArgumentError, BlockPool, NotCopyableError
from torchpaged.cache import PrefixCache
from torchpaged.cache.prefix_cache import CachedText


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(BlockPool(20), block_size=4)


def written(cache: PrefixCache, tokens: list[int], extra: Any = None) -> list[int]:
    """The blocks of a text that was computed and left."""
    text = cache.text(tokens, extra)
    blocks = text.take()
    assert blocks is not None
    blocks += cache.pool.allocate(-(-len(tokens) // cache.block_size) - len(blocks))
    text.computed(len(tokens), blocks)
    text.leave()
    cache.pool.free(blocks)
    return blocks


def found(cache: PrefixCache, tokens: list[int], extra: Any = None) -> list[int] | None:
    blocks = cache.text(tokens, extra).take()
    cache.pool.free(blocks or [])
    return blocks


# -------------------------------------------------------------------------------------------- what is found
@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        ([*range(12), 50], 3),
        (list(range(12)), 2),  # its last token is in the third
        (list(range(11)), 2),
        (list(range(8)), 1),
        ([0, 1, 2, 3], 0),
        ([0, 1, 2, 4, 4, 5, 6, 7, 8], 0),
        ([*range(4), 9, 5, 6, 7, 8], 1),
        ([4, 5, 6, 7, 8, 9, 10, 11, 12], 0),  # the same tokens at another place
    ],
    ids=str,
)
def test_full_blocks_before_the_last_token(cache: PrefixCache, tokens: list[int], count: int) -> None:
    blocks = written(cache, list(range(12)))
    assert found(cache, tokens) == blocks[:count]


def test_a_last_block_that_fills_later(cache: PrefixCache) -> None:
    """Outputs continue a prompt; a block is known when all of its tokens are computed."""
    text, blocks = cache.text(list(range(6))), cache.pool.allocate(2)
    assert text.take() == []
    text.computed(6, blocks)
    assert found(cache, list(range(9))) == blocks[:1]
    text.extend([6, 7, 8])
    text.computed(7, blocks)
    assert found(cache, list(range(9))) == blocks[:1]
    text.computed(8, blocks)
    assert found(cache, list(range(9))) == blocks


@pytest.mark.parametrize("extra", ["tenant", 1, ("adapter", "salt"), b"", ""], ids=repr)
def test_extra_keys_separate(cache: PrefixCache, extra: Any) -> None:
    mine, theirs = written(cache, list(range(9)), extra), written(cache, list(range(9)))
    assert not set(mine[:2]) & set(theirs[:2])
    assert found(cache, list(range(9)), extra) == mine[:2]
    assert found(cache, list(range(9)), "nobody's") == []


def test_ids_that_stand_for_an_image(cache: PrefixCache) -> None:
    """Placeholders are alike in every prompt; a hash of the image in their place is not."""
    cat, dog = [2**62 + 5, -(2**60)], [2**62 + 6, -(2**60)]
    blocks = written(cache, [1, 2, 3, 4, *cat, 5, 6, 7])
    assert found(cache, [1, 2, 3, 4, *cat, 5, 6, 9]) == blocks[:2]
    assert found(cache, [1, 2, 3, 4, *dog, 5, 6, 7]) == blocks[:1]


class _Clash(str):
    """Every one has the hash of every other."""

    def __hash__(self) -> int:
        return 7


def test_a_hash_collision_finds_nothing_wrong(cache: PrefixCache) -> None:
    one, other = written(cache, list(range(9)), _Clash("one")), written(cache, list(range(9)), _Clash("two"))
    assert found(cache, list(range(9)), _Clash("one")) == one[:2]
    assert found(cache, list(range(9)), _Clash("two")) == other[:2]
    assert found(cache, list(range(9)), _Clash("three")) == []


# ------------------------------------------------------------------------------------- holders and eviction
def test_idle_blocks_count_as_free_until_they_are_taken(cache: PrefixCache) -> None:
    blocks, pool = written(cache, list(range(12))), cache.pool
    assert (pool.num_free, pool.num_idle, len(cache)) == (19, 3, 3)
    held = cache.text([*range(12), 5]).take()
    assert held == blocks
    assert (pool.num_free, pool.num_idle, pool.num_used) == (16, 0, 3)
    assert [pool.ref_count(block) for block in blocks] == [1, 1, 1]
    pool.free(held)
    assert (pool.num_free, pool.num_idle) == (19, 3)


def test_the_least_recently_left_goes_first_and_the_end_of_a_text_before_its_beginning() -> None:
    cache = PrefixCache(BlockPool(7), block_size=4)
    old, new = written(cache, list(range(12))), written(cache, list(range(20, 32)))
    assert found(cache, [*range(12), 0]) == old, "used again, it is the newer one"
    cache.pool.free(cache.pool.allocate(1))
    assert found(cache, [*range(20, 32), 0]) == new[:2]
    assert found(cache, [*range(12), 0]) == old
    cache.pool.free(cache.pool.allocate(3))
    assert found(cache, [*range(20, 32), 0]) == []
    assert found(cache, [*range(12), 0]) == old
    assert cache.stats.evicted_blocks == 3


def test_blocks_that_hold_nothing_go_before_idle_ones(cache: PrefixCache) -> None:
    blocks = written(cache, list(range(12)))
    others = cache.pool.allocate(16)
    assert not set(blocks) & set(others)
    assert found(cache, [*range(12), 0]) == blocks


def test_what_is_behind_a_block_that_went_is_found_when_that_comes_back() -> None:
    """Two compute the same at once: one's block is known, the other's text goes on behind it."""
    cache = PrefixCache(BlockPool(6), block_size=4)
    one, other = cache.text(list(range(5))), cache.text(list(range(9)))
    assert one.take() == other.take() == []
    first, second = cache.pool.allocate(2), cache.pool.allocate(3)
    one.computed(4, first)
    other.computed(8, second)
    assert found(cache, list(range(9))) == [first[0], second[1]]
    one.leave()
    cache.pool.free(first)
    cache.pool.free(cache.pool.allocate(2))
    assert found(cache, list(range(9))) == []
    other.extend([9, 10, 11, 12])
    other.computed(12, second)
    assert found(cache, list(range(13))) == []
    again, block = cache.text(list(range(13))), cache.pool.allocate(1)
    assert again.take() == []
    again.promise()
    again.computed(4, block)
    assert found(cache, list(range(13))) == [*block, *second[1:]]


def test_without_keep_blocks_go_with_their_last_holder() -> None:
    cache = PrefixCache(BlockPool(9), block_size=4, keep=False)
    text = cache.text(list(range(9)))
    assert text.take() == []
    blocks = cache.pool.allocate(3)
    text.computed(9, blocks)
    shared = cache.text(list(range(6))).take()
    assert shared == blocks[:1]
    text.leave()
    cache.pool.free(blocks)
    assert found(cache, list(range(9))) == blocks[:1]
    cache.pool.free(shared)
    assert (len(cache), cache.pool.num_idle, cache.stats.evicted_blocks) == (0, 0, 0)


# ------------------------------------------------------------------------------------------------- promises
def test_who_shares_what_is_being_computed_waits(cache: PrefixCache) -> None:
    first, blocks = cache.text(list(range(12))), cache.pool.allocate(3)
    assert first.take() == []
    first.promise()
    waits = cache.text([*range(8), 50])
    assert waits.take() is None
    assert (waits.num_shared(), first.num_shared()) == (2, 0)
    first.computed(7, blocks)
    assert waits.take() is None
    first.computed(12, blocks)
    assert waits.take() == blocks[:2]
    assert cache.stats.queried_tokens == 12 + 9, "asking again is not counted again"


def test_nobody_waits_for_one_that_has_left(cache: PrefixCache) -> None:
    first, blocks = cache.text(list(range(12))), cache.pool.allocate(3)
    assert first.take() == []
    first.promise()
    first.computed(4, blocks)
    waits = cache.text(list(range(10)))
    assert waits.take() is None
    first.leave()
    assert waits.num_shared() == 1
    assert waits.take() == blocks[:1]


def test_idle_blocks_are_not_free_of_charge(cache: PrefixCache) -> None:
    written(cache, list(range(12)))
    text = cache.text([*range(12), 5])
    assert text.num_shared() == 0
    held = cache.text(list(range(9))).take()
    assert text.num_shared() == 2
    cache.pool.free(held or [])


# -------------------------------------------------------------------------------------------------- reasons
def test_why_a_hit_ended(cache: PrefixCache) -> None:
    written(cache, list(range(12)))
    found(cache, [*range(8), 50, 51, 52, 53, 54, 55])
    assert cache.stats.hit_tokens == 8
    assert cache.stats.missed_tokens == {"new": 8 + 4, "tail": 4 + 2}
    cache.pool.free(cache.pool.allocate(17))
    found(cache, [*range(12), 50])
    assert cache.stats.missed_tokens == {"new": 12, "tail": 7, "evicted": 4}
    cache.clear("other weights")
    found(cache, [*range(12), 50])
    assert cache.stats.missed_tokens == {"new": 12, "tail": 8, "evicted": 4, "other weights": 12}
    assert cache.stats.queried_tokens == cache.stats.hit_tokens + sum(cache.stats.missed_tokens.values())


def test_clear_leaves_holders_alone_and_cuts_texts_off(cache: PrefixCache) -> None:
    text, blocks = cache.text(list(range(12))), cache.pool.allocate(3)
    assert text.take() == []
    text.promise()
    text.computed(5, blocks)
    waits = cache.text(list(range(9)))
    assert waits.take() is None
    cache.clear("other weights")
    text.computed(12, blocks)
    assert waits.take() == []
    assert (len(cache), cache.pool.num_used) == (0, 3)
    text.leave()
    cache.pool.free(blocks)
    assert (cache.pool.num_idle, cache.pool.num_free) == (0, 19)


@pytest.mark.parametrize("is_promised", [True, False])
def test_what_can_not_be_trusted_is_not_found_behind_a_block_that_went(is_promised: bool) -> None:
    """Its own first block is not the one that was known, and that one comes back under its name."""
    cache, tokens = PrefixCache(BlockPool(6), block_size=4), list(range(9))
    pool, short, bad, again = cache.pool, cache.text(tokens[:4]), cache.text(tokens), cache.text(tokens)
    assert (short.take(), bad.take()) == ([], []), "a single block is not promised: both compute it"
    bad.promise()
    first, others = pool.allocate(1), pool.allocate(3)
    short.computed(4, first)
    bad.computed(9, others)
    short.leave()
    pool.free(first)
    pool.free(pool.allocate(2))
    if is_promised:
        assert again.take() == []
        again.promise()
    bad.forget()
    pool.free(others)
    assert len(cache) == 0
    if is_promised:
        again.computed(4, new := pool.allocate(3))
        again.leave()
        pool.free(new)
    else:
        new = written(cache, tokens[:4])
    assert found(cache, tokens) == new[:1]


def test_what_can_not_be_trusted_is_not_found(cache: PrefixCache) -> None:
    blocks = written(cache, list(range(8)))
    bad = cache.text(list(range(20)))
    assert bad.take() == blocks
    bad.forget()
    bad.computed(20, blocks + cache.pool.allocate(3))
    assert found(cache, list(range(20))) == []
    assert cache.stats.missed_tokens["failed"] == 8 + 8


# ------------------------------------------------------------------------------------------------- refusals
def test_refusals(cache: PrefixCache) -> None:
    for tokens in ([2**63], ["a"], [1.5], None):
        with pytest.raises(ArgumentError, match="tokens: expected ids, signed 64-bit integers"):
            cache.text(tokens)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="extra: expected something that can be hashed"):
        cache.text([1], extra=[])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="pool: expected a BlockPool of no other PrefixCache"):
        PrefixCache(cache.pool, 4)
    with pytest.raises(ArgumentError, match="block_size"):
        PrefixCache(BlockPool(4), 0)
    one, blocks = cache.text(list(range(5))), cache.pool.allocate(2)
    one.computed(4, blocks)
    with pytest.raises(ArgumentError, match="blocks: expected blocks of these tokens alone"):
        cache.text(list(range(1, 6))).computed(4, blocks)
    with pytest.raises(ArgumentError, match="blocks that are held"):
        cache.text(list(range(2, 7))).computed(4, [9])


def test_a_pool_that_was_reset_holds_nothing_that_is_known(cache: PrefixCache) -> None:
    written(cache, list(range(12)))
    cache.pool.reset()
    cache.pool.allocate(19)
    assert found(cache, [*range(12), 5]) == []
    assert len(cache) == 0


def test_a_copied_pool_knows_nothing(cache: PrefixCache) -> None:
    import copy

    written(cache, list(range(12)))
    with pytest.raises(NotCopyableError):
        copy.deepcopy(cache)
    pool = copy.deepcopy(cache.pool)
    assert (pool.num_free, pool.num_idle) == (19, 0)
    assert sorted(pool.allocate(19)) == list(range(1, 20))
    assert len(cache) == 3


# ------------------------------------------------------------------------------------------ a state machine
class Machine:
    """Requests over one cache, in any order; what each block holds is written down beside it.

    Few tokens and short blocks, so that texts share, wait and collide in their places all the time.
    """

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.size = self.r.choice([1, 2, 3])
        self.pool = BlockPool(self.r.choice([4, 9, 17]))
        self.cache = PrefixCache(self.pool, self.size, keep=self.r.random() < 0.8)
        self.systems = [self.r.choices(range(2), k=8) for _ in range(3)]
        self.texts: list[tuple[CachedText, list[int], Any]] = []  # those that wait
        self.live: list[dict[str, Any]] = []
        self.others: list[list[int]] = []  # holders that are no texts
        self.memory: dict[int, Any] = {}  # by block: its tokens and all before, and the weights
        self.weights = 0

    def step(self) -> None:
        moves = [self.ask, self.ask, self.take, self.take, self.grow, self.grow, self.grow]
        moves += [self.leave, self.leave, self.hold, self.fork, self.release, self.rarely]
        self.r.choice(moves)()
        self.check()

    def ask(self) -> None:
        if len(self.texts) < 4:
            tokens = self.r.choices(range(2), k=self.r.randint(1, 4))
            tokens = self.r.choice(self.systems)[: self.r.randint(0, 8)] + tokens
            if self.live and self.r.random() < 0.5:  # the next turn of a chat
                tokens = self.r.choice(self.live)["tokens"][:20] + tokens[:3]
            extra = self.r.choice([None, None, "salt"])
            self.texts.append((self.cache.text(tokens, extra), tokens, extra))

    def take(self) -> None:
        if not self.texts:
            return
        text, tokens, extra = self.texts.pop(self.r.randrange(len(self.texts)))
        shared = text.num_shared()
        blocks = text.take()
        if blocks is None:
            assert shared
            self.texts.append((text, tokens, extra))
            return
        assert len(blocks) * self.size < len(tokens)
        for place, block in enumerate(blocks):
            assert self.memory[block] == (extra, tokens[: (place + 1) * self.size], self.weights)
        if self.r.random() < 0.7:
            text.promise()
        live = {"text": text, "tokens": tokens, "extra": extra, "blocks": blocks, "weights": self.weights}
        self.live.append(live | {"computed": len(blocks) * self.size, "known": len(tokens)})

    def grow(self) -> None:
        if not self.live:
            return
        one = self.r.choice(self.live)
        if one["computed"] == len(one["tokens"]):
            one["tokens"] = one["tokens"] + self.r.choices(range(2), k=self.r.randint(1, 4))
        end = min(len(one["tokens"]), one["computed"] + self.r.randint(1, 6))
        need = -(-end // self.size) - len(one["blocks"])
        if need > self.pool.num_free:
            return self.end(self.r.choice(self.live))
        one["blocks"] += self.pool.allocate(max(need, 0))
        for place in range(one["computed"] // self.size, -(-end // self.size)):
            assert self.pool.ref_count(one["blocks"][place]) >= 1
            tokens = one["tokens"][: min(end, (place + 1) * self.size)]
            self.memory[one["blocks"][place]] = one["extra"], tokens, one["weights"]
        one["computed"] = end
        if self.r.random() < 0.6:
            self.publish(one)

    def publish(self, one: dict[str, Any]) -> None:
        if one["computed"] > len(one["text"]):
            one["text"].extend(one["tokens"][len(one["text"]) : one["computed"]])
        one["text"].computed(one["computed"], one["blocks"])

    def end(self, one: dict[str, Any]) -> None:
        self.live.remove(one)
        end = self.r.random()
        if end < 0.6:
            self.publish(one)
        elif end < 0.65:
            one["text"].forget()
        one["text"].leave()
        self.pool.free(one["blocks"])

    def leave(self) -> None:
        if self.live and (len(self.live) > 5 or self.r.random() < 0.4):
            self.end(self.r.choice(self.live))

    def hold(self) -> None:
        if len(self.others) < 3:
            self.others.append(self.pool.allocate(self.r.randint(0, min(3, self.pool.num_free))))
            for block in self.others[-1]:
                self.memory[block] = "another's"

    def fork(self) -> None:
        if self.live and len(self.others) < 4:
            self.others.append(self.pool.fork(self.r.choice(self.live)["blocks"]))

    def release(self) -> None:
        if self.others:
            self.pool.free(self.others.pop(self.r.randrange(len(self.others))))

    def rarely(self) -> None:
        what = self.r.random()
        if what < 0.03:
            self.cache.clear("changed")
            self.weights += 1
        if 0.02 < what < 0.03:  # a step broke off
            self.pool.reset()
            self.live, self.texts, self.others = [], [], []
        elif 0.03 < what < 0.2 and self.texts:
            self.texts.pop()

    def check(self) -> None:
        pool, cache = self.pool, self.cache
        holders = [0] * pool.num_blocks
        for blocks in [*(one["blocks"] for one in self.live), *self.others]:
            for block in blocks:
                holders[block] += 1
        assert holders[1:] == pool._ref_counts[1:]
        assert len(pool._free) + len(pool._idle) == holders[1:].count(0)
        assert not set(pool._free) & set(pool._idle)
        assert set(pool._idle) == {block for block in pool._kept if not holders[block]}
        assert cache.keeps or not pool._idle
        known = set(cache._table.values())
        assert pool._kept == known
        assert len(known) == len(cache._table)
        assert all(cache._keys[block] == key for key, block in cache._table.items())
        assert sum(key is not None for key in cache._keys) == len(known)
        names = [cache._names[block] for block in known] + list(cache._promised.values())
        assert len(set(names)) == len(names)
        assert not cache._promised.keys() & cache._table.keys()
        assert not cache._lost.keys() & cache._table.keys()
        assert len(cache._lost) <= pool.num_blocks
        if not self.live:
            assert not cache._promised
        stats = cache.stats
        assert stats.queried_tokens == stats.hit_tokens + sum(stats.missed_tokens.values())


def run_machines(seed: int, operations: int, each: int = 500) -> int:
    """Machines of ``each`` operations; returns tokens found."""
    hits = 0
    for number in range(operations // each):
        machine = Machine(seed * 1_000_003 + number)
        for _ in range(each):
            machine.step()
        hits += machine.cache.stats.hit_tokens
    return hits


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_operations(seed: int) -> None:
    assert run_machines(seed, 5000) > 500


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_any_order_of_many_operations(seed: int) -> None:
    assert run_machines(seed, 50_000) > 5000
