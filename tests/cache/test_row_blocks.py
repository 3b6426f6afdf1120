"""RowBlocks: forks, cuts and the copies they need, against tokens kept in a plain dict of blocks."""

import random
from typing import Any

import pytest

from torchpaged import BlockPool
from torchpaged.cache.row_blocks import RowBlocks
from torchpaged.custom_ops.errors import BlockPoolExhaustedError

BLOCK, PER_ROW = 4, 3


class Tokens:
    """What the blocks hold, and what each row should."""

    def __init__(self, batch: int, most: int, first: int) -> None:
        self.pool = BlockPool(most * PER_ROW + 1)
        self.rows = RowBlocks(self.pool, BLOCK, first)
        self.rows.allocate(batch)
        self.memory: dict[tuple[int, int], int] = {}
        self.want: list[list[int]] = [[] for _ in range(batch)]
        self.next = 0

    def write(self) -> None:
        if max(map(len, self.want)) == BLOCK * self.rows.blocks_per_row:
            self.rows.grow(self.rows.blocks_per_row + 1)
        for row, tokens in zip(self.rows.rows, self.want, strict=True):
            place = len(tokens)
            self.memory[row[place // BLOCK], place % BLOCK] = self.next
            tokens.append(self.next)
            self.next += 1

    def copy(self, copies: list[tuple[int, int]]) -> None:
        before = dict(self.memory)
        for source, destination in copies:
            for offset in range(BLOCK):
                if (source, offset) in before:
                    self.memory[destination, offset] = before[source, offset]

    def check(self) -> None:
        got = [
            [self.memory[row[i // BLOCK], i % BLOCK] for i in range(len(tokens))]
            for row, tokens in zip(self.rows.rows, self.want, strict=True)
        ]
        assert got == self.want
        held = {block for row in self.rows.rows for block in row}
        assert all(len(row) == self.rows.blocks_per_row for row in self.rows.rows)
        assert self.pool.num_used == len(held)


@pytest.mark.parametrize("first", [PER_ROW, 1])
@pytest.mark.parametrize("seed", range(20))
def test_rows_hold_their_tokens_through_forks_and_cuts(seed: int, first: int) -> None:
    """Rows that have all of their blocks from the start, and rows that grow."""
    rng = random.Random(seed)
    t = Tokens(4, 4, first)
    for _ in range(60):
        kind = rng.choice(("write", "write", "reindex", "cut"))
        if kind == "write" and max(map(len, t.want)) < BLOCK * PER_ROW:
            t.write()
        elif kind == "reindex":
            parents = [rng.randrange(len(t.want)) for _ in range(rng.choice([4, 4, 3, 2]))]
            t.copy(t.rows.reindex(parents, [len(tokens) for tokens in t.want]))
            t.want = [list(t.want[parent]) for parent in parents]
        elif kind == "cut":
            count = rng.randrange(1, 6)
            kept = [max(len(tokens) - count, 0) for tokens in t.want]
            t.copy(t.rows.unshare(kept) or [])
            t.want = [tokens[:length] for tokens, length in zip(t.want, kept, strict=True)]
        t.check()
    t.rows.free()
    assert t.pool.num_used == 0
    assert len(t.rows) == 0


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
