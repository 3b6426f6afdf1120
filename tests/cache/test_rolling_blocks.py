"""RollingBlocks: forks and cuts of rings, against tokens kept in a plain dict of blocks."""

import random

import pytest

from torchpaged.cache import RollingBlocks
from torchpaged.custom_ops.errors import ArgumentError

BLOCK, WINDOW, STEP, RINGS = 4, 7, 5, 3


class Rows:
    """What the rings hold, and what each row should; rows of one length, as a cache's are."""

    def __init__(self, batch: int) -> None:
        self.rolling = RollingBlocks(WINDOW, STEP, BLOCK, RINGS)
        self.rolling.allocate(batch)
        self.memory: dict[tuple[int, int], int] = {}
        self.want: list[list[int]] = [[] for _ in range(batch)]
        self.next, self.longest = 0, 0

    def place(self, row: int, position: int) -> tuple[int, int]:
        table = self.rolling.table(self.rolling.rings[row], 100)
        return table[position // BLOCK], position % BLOCK

    def write(self, count: int) -> None:
        for row, tokens in enumerate(self.want):
            for _ in range(count):
                self.memory[self.place(row, len(tokens))] = self.next
                tokens.append(self.next)
                self.next += 1
        self.longest = max(self.longest, len(self.want[0]))

    def require(self, count: int) -> None:
        """The last ``count`` tokens of every row see all of their windows."""
        for row, tokens in enumerate(self.want):
            for position in range(max(len(tokens) - count + 1 - WINDOW, 0), len(tokens)):
                assert self.memory[self.place(row, position)] == tokens[position]

    def reindex(self, parents: list[int]) -> None:
        copies = self.rolling.reindex(parents, [len(tokens) for tokens in self.want])
        assert not {a for a, _ in copies} & {b for _, b in copies}
        before = dict(self.memory)
        for source, destination in copies:
            for offset in range(BLOCK):
                self.memory.pop((destination, offset), None)
                if (source, offset) in before:
                    self.memory[destination, offset] = before[source, offset]
        self.want = [list(self.want[parent]) for parent in parents]

    def crop(self, count: int) -> bool:
        """Whether the rings allow it; done then."""
        length = len(self.want[0]) - count
        if not self.rolling.keeps(length, self.longest):
            return False
        self.want = [tokens[:length] for tokens in self.want]
        return True


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_any_history_keep_what_their_next_queries_see(seed: int) -> None:
    r, rows, allowed = random.Random(seed), Rows(2), 0
    for _ in range(60):
        rows.write(count := r.randint(1, STEP))
        rows.require(count)
        if r.random() < 0.4:
            rows.reindex([r.randrange(len(rows.want)) for _ in range(r.randint(1, RINGS))])
            rows.require(1)
        if r.random() < 0.4:
            allowed += rows.crop(min(r.randint(1, 2 * STEP), len(rows.want[0])))
            rows.require(0)
    assert allowed


def test_a_cut_behind_what_was_written_over_is_known() -> None:
    """Where `keeps` says no, the token is gone indeed: the bound is exact to a block."""
    rows = Rows(1)
    for _ in range(20):
        rows.write(1)
        for count in range(1, len(rows.want[0])):
            length = len(rows.want[0]) - count
            positions = range(max(length + 1 - WINDOW, 0) // BLOCK * BLOCK, length)
            there = all(rows.memory[rows.place(0, p)] == rows.want[0][p] for p in positions)
            kept = rows.rolling.keeps(length, rows.longest)
            assert not kept or there
            # The first block may be overwritten in part only: then a cut is refused that a lucky row allowed.
            assert kept or not there or rows.longest % BLOCK


def test_a_ring_does_not_depend_on_the_rows_length() -> None:
    rolling = RollingBlocks(window=512, step=512, block_size=16, num_rings=2)
    assert rolling.blocks_per_ring == 65
    assert rolling.num_blocks == 131
    table = rolling.table(1, 1000)
    assert len(table) == 1000
    assert set(table) == set(range(66, 131))
    assert table[65:130] == table[:65]


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="window"):
        RollingBlocks(0, 1, 16, 1)
    rolling = RollingBlocks(8, 8, 4, 2)
    with pytest.raises(ArgumentError, match="at most 2 rows"):
        rolling.allocate(3)
    rolling.allocate(2)
    with pytest.raises(ArgumentError, match="at most 2 rows"):
        rolling.reindex([0, 0, 1], [4, 4])
    assert rolling.rings == [0, 1]
