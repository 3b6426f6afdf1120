"""RowBlocks: pools without room, and how little a step changes; in any order: `cache_machine`."""

import itertools
from typing import Any

import pytest

from torchpaged import BlockPool
from torchpaged.cache.row_blocks import RowBlocks
from torchpaged.custom_ops.errors import BlockPoolExhaustedError

BLOCK, PER_ROW = 4, 3


def test_a_pool_that_is_too_small_changes_nothing() -> None:
    rows = RowBlocks(BlockPool(PER_ROW + 1), BLOCK, PER_ROW)
    with pytest.raises(BlockPoolExhaustedError):
        rows.allocate(2)
    assert len(rows) == 0
    assert rows.pool.num_used == 0
    rows.allocate(1)
    assert rows.unshare([2]) is None
    before = list(rows.rows[0])
    with pytest.raises(BlockPoolExhaustedError):
        rows.grow(PER_ROW + 1)
    assert (rows.rows, rows.blocks_per_row) == ([before], PER_ROW)


@pytest.mark.parametrize("parents", itertools.product(range(3), repeat=3), ids=str)
def test_as_many_rows_find_room_in_a_full_pool(parents: tuple[int, ...]) -> None:
    rows = RowBlocks(BlockPool(3 * PER_ROW + 1), BLOCK, PER_ROW)
    rows.allocate(3)
    for lengths in ([1, BLOCK + 1, 2 * BLOCK], [2 * BLOCK + 1] * 3):
        rows.reindex(parents, lengths)
        assert rows.pool.num_used == len({block for row in rows.rows for block in row})
        rows.unshare([0, 0, 0])


def test_a_step_of_a_beam_search_changes_few_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of blocks that the rows share already, and none of blocks without tokens."""
    rows = RowBlocks(BlockPool(4 * 100 + 1), BLOCK, 100)
    rows.allocate(4)
    rows.reindex([0, 0, 0, 0], [BLOCK * 50 + 1] * 4)
    changed = list[int]()
    for name in ("allocate", "fork", "free"):
        method = getattr(BlockPool, name)

        def counted(self: BlockPool, blocks: Any, method: Any = method) -> Any:
            changed.append(blocks if isinstance(blocks, int) else len(blocks))
            return method(self, blocks)

        monkeypatch.setattr(BlockPool, name, counted)
    copies = rows.reindex([1, 1, 2, 3], [BLOCK * 53 + 1] * 4)
    assert (copies, changed) == ([(rows.rows[0][53], rows.rows[1][53])], [3, 3])
    assert rows.rows[0][:53] == rows.rows[1][:53]
    assert not set(rows.rows[0][53:]) & set(rows.rows[1][53:])


@pytest.mark.parametrize("parents", [[0, 0, 0], [1, 1, 1], [0, 1, 1]])
def test_forks_that_find_no_room_change_nothing(parents: list[int]) -> None:
    rows = RowBlocks(BlockPool(2 * PER_ROW + 1), BLOCK, PER_ROW)
    rows.allocate(2)
    before, pool = [list(row) for row in rows.rows], rows.pool
    counts = [pool.ref_count(block) for row in before for block in row]
    with pytest.raises(BlockPoolExhaustedError):
        rows.reindex(parents, [BLOCK - 1, 2 * BLOCK - 1])
    assert rows.rows == before
    assert [pool.ref_count(block) for row in before for block in row] == counts
    assert pool.num_free == 0
    rows.free()
    assert pool.num_used == 0
