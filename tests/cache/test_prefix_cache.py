"""PrefixCache: what is found, held, waited for and given up; and any order of operations keeps the books."""

from typing import Any

import pytest

from torchpaged import ArgumentError, BlockPool, NotCopyableError
from torchpaged.cache import PrefixCache


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
    assert found(cache, list(range(9)), "another") == []


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
    assert (pool.num_free, len(pool.idle), len(cache)) == (19, 3, 3)
    held = cache.text([*range(12), 5]).take()
    assert held == blocks
    assert (pool.num_free, len(pool.idle), pool.num_used) == (16, 0, 3)
    assert [pool.ref_count(block) for block in blocks] == [1, 1, 1]
    pool.free(held)
    assert (pool.num_free, len(pool.idle)) == (19, 3)


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
    assert (len(cache), len(cache.pool.idle), cache.stats.evicted_blocks) == (0, 0, 0)


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


def test_no_request_waits_for_one_that_has_left(cache: PrefixCache) -> None:
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
    assert (len(cache.pool.idle), cache.pool.num_free) == (0, 19)


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


def test_what_is_remembered_is_bounded_by_the_pool() -> None:
    """Also of texts whose first block comes and goes for ever, and whose other ones went long ago."""
    cache = PrefixCache(BlockPool(41), block_size=4)
    for number in range(60):
        written(cache, [number] * 40)
        for before in range(max(number - 20, 0), number):
            written(cache, [before] * 4)
        assert sum(len(run.tokens) for run in cache._runs.by_key.values()) < 4 * 41 * cache._runs.step


# ------------------------------------------------------------------------------------------------- refusals
def test_refusals(cache: PrefixCache) -> None:
    for tokens in ([2**63], ["a"], [1.5], None, b"8 bytes.", bytearray(8)):
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
    assert (pool.num_free, len(pool.idle)) == (19, 0)
    assert sorted(pool.allocate(19)) == list(range(1, 20))
    assert len(cache) == 3
