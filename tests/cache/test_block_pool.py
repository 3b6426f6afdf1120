"""BlockPool: allocation, reference counts, exhaustion, and that a failed call changes nothing."""

import pytest

from torchpaged import ArgumentError, BlockPool, BlockPoolExhaustedError


def state(pool: BlockPool) -> tuple[int, list[int]]:
    return pool.num_free, [pool.ref_count(b) for b in range(1, pool.num_blocks)]


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_exhaustion_is_typed_and_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    before = state(pool)
    with pytest.raises(
        BlockPoolExhaustedError, match="2 requested, 1 free of 3 usable.*num_blocks=5 or more"
    ) as caught:
        pool.allocate(2)
    assert (caught.value.requested, caught.value.available, caught.value.total) == (2, 1, 3)
    assert state(pool) == before


def test_fork_keeps_blocks_until_the_last_holder_leaves() -> None:
    pool = BlockPool(4)
    parent = pool.allocate(2)
    child = pool.fork(parent)
    pool.free(parent)
    assert pool.num_free == 1
    assert [pool.ref_count(b) for b in child] == [1, 1]
    pool.free(child)
    assert pool.num_free == 3


def test_blocks_that_are_kept_are_forked_as_any_others() -> None:
    """Held ones and idle ones, whatever of them is known."""
    found = []
    for name in ("fork", "fork_kept"):
        pool = BlockPool(8)
        pool.watch(lambda blocks, kept: None)
        held, idle = pool.allocate(2), pool.allocate(2)
        pool.keep([*held, *idle], "text")
        pool.free(idle)
        for blocks in ([*held, *idle], idle, held):
            assert getattr(pool, name)(blocks) == blocks
        found.append(([pool.ref_count(block) for block in (*held, *idle)], len(pool.idle), pool.peak_used))
    assert found[0] == found[1] == ([3, 3, 2, 2], 0, 4)


@pytest.mark.parametrize("wrong", [[0], [9], [-1], [1, 1], [2]])
def test_bad_frees_are_refused_whole(wrong: list[int]) -> None:
    pool = BlockPool(4)
    assert pool.allocate(1) == [1]
    before = state(pool)
    with pytest.raises(ArgumentError, match="blocks"):
        pool.free([1, *wrong] if wrong != [1, 1] else wrong)
    assert state(pool) == before


def test_sizes() -> None:
    for size in (1, 2.5, 3.0, "4", None, True):
        with pytest.raises(ArgumentError, match="num_blocks: expected an int of at least 2"):
            BlockPool(size)  # type: ignore[arg-type]
    pool = BlockPool(3)
    for count in (-1, 1.5, 1.0, "1", None, True):
        with pytest.raises(ArgumentError, match="count: expected an int of at least 0"):
            pool.allocate(count)  # type: ignore[arg-type]
    pool.allocate(1)
    for block in (1.0, "1", None, True):
        for call in (pool.free, pool.fork):
            with pytest.raises(ArgumentError, match="blocks: expected block ids in"):
                call([block])  # type: ignore[list-item, operator]
    assert pool.ref_count(1) == 1
    assert pool.num_free == 1


def test_all_is_free_after_a_reset_though_who_is_told_raises() -> None:
    def raises(blocks: list[int], what: dict[int, object]) -> None:
        raise KeyError(blocks[0])

    pool = BlockPool(8)
    pool.watch(raises)
    pool.keep(pool.allocate(3), "text")
    with pytest.raises(KeyError):
        pool.reset()
    assert (pool.num_used, len(pool.idle), pool.num_free) == (0, 0, 7)
    assert sorted(pool.allocate(7)) == list(range(1, 8))
