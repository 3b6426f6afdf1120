"""RowBlocks: which blocks the rows of a batch hold, every row equally many, and which rows share some. Host
data only, no tensors.

    rows = RowBlocks(pool, block_size=16, blocks_per_row=8)
    rows.allocate(batch=2)
    # row 1 forks row 0: block 0 is shared, the rest of row 1 is its own
    copies = rows.reindex([0, 0, 1], lengths=[20, 5])

What a change makes necessary on the device, it gives back: ``(source, destination)`` pairs of blocks whose
tokens must be copied.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import compress, count
from operator import ne

from torchpaged.cache.block_pool import BlockPool
from torchpaged.custom_ops.errors import BlockPoolExhaustedError


class RowBlocks:
    """The blocks of each row.

    Args:
        pool: gives the blocks.
        block_size: tokens per block.
        blocks_per_row: blocks of every row.

    Attributes:
        rows: block ids of each row.
        blocks_per_row: as given; `grow` raises it, and what is set between two batches is of the next one.
    """

    def __init__(self, pool: BlockPool, block_size: int, blocks_per_row: int) -> None:
        self.pool, self.block_size, self.blocks_per_row = pool, block_size, blocks_per_row
        self.rows: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.rows)

    def allocate(self, batch: int) -> None:
        """Give ``batch`` rows their blocks; there were none before.

        Raises:
            BlockPoolExhaustedError: the pool has fewer; nothing is taken then.
        """
        taken = self.pool.allocate(batch * self.blocks_per_row)
        self.rows = [taken[i * self.blocks_per_row : (i + 1) * self.blocks_per_row] for i in range(batch)]

    def grow(self, blocks_per_row: int) -> None:
        """Every row has so many blocks from now on, not fewer than before.

        Raises:
            BlockPoolExhaustedError: the pool has too few; nothing is taken then.
        """
        more = blocks_per_row - self.blocks_per_row
        taken = self.pool.allocate(more * len(self.rows))
        for i, row in enumerate(self.rows):
            row += taken[i * more : (i + 1) * more]
        self.blocks_per_row = blocks_per_row

    def free(self) -> None:
        """Give all blocks back."""
        for row in self.rows:
            self.pool.free(row)
        self.rows = []

    def unshare(self, kept: Sequence[int]) -> list[tuple[int, int]] | None:
        """Give every row blocks of its own from its first ``kept`` tokens on: it will write there, and others
        must not see that.

        Returns:
            The copies that are needed; None if no block changed its place.

        Raises:
            BlockPoolExhaustedError: the pool has too few; nothing is changed then.
        """
        if all(self.pool.ref_count(block) == 1 for row in self.rows for block in row):
            return None
        taken: Counter[int] = Counter()
        # Row, place in it, whether tokens before the cut lie there.
        shared: list[tuple[list[int], int, bool]] = []
        for row, length in zip(self.rows, kept, strict=True):
            for place in range(length // self.block_size, len(row)):
                if self.pool.ref_count(row[place]) - taken[row[place]] > 1:
                    taken[row[place]] += 1
                    shared.append((row, place, length > place * self.block_size))
        own, copies = self.pool.allocate(len(shared)), []
        for (row, place, has_tokens), block in zip(shared, own, strict=True):
            if has_tokens:
                copies.append((row[place], block))
            self.pool.free([row[place]])
            row[place] = block
        return copies

    def reindex(self, parents: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
        """New row ``i`` is a fork of old row ``parents[i]``, which holds ``lengths[parents[i]]`` tokens;
        gives the copies that are needed.

        A parent's first child keeps its blocks; every further child shares the full ones and has blocks of
        its own from there on. These are those of a row without children, while there is one as short: then
        only blocks change hands that the two rows do not share already, O(1) of them in a step of a beam
        search. Other rows without children are freed first, so that with an unchanged number of rows enough
        blocks are always free.

        Raises:
            BlockPoolExhaustedError: the pool has too few; nothing is changed then.
        """
        old_rows, rows, copies = self.rows, list[list[int]](), list[tuple[int, int]]()
        childless = sorted(set(range(len(old_rows))) - set(parents))
        full = [max(length, 0) // self.block_size for length in lengths]
        seen, further, given = set[int](), list[tuple[int, int]](), list[tuple[int, int, int]]()
        for place, parent in enumerate(parents):
            if parent not in seen:
                seen.add(parent)
            elif childless and full[childless[-1]] <= full[parent]:
                given.append((place, parent, childless.pop()))
            else:
                further.append((place, parent))
            rows.append(old_rows[parent])
        wanted = sum(self.blocks_per_row - full[parent] for _, parent in further)
        self._require_room(wanted, [old_rows[row] for row in childless])
        for row in childless:
            self.pool.free(old_rows[row])
        for place, parent, row in given:
            rows[place] = self._go_on_from(old_rows[row], old_rows[parent], full[parent])
        for place, parent in further:
            own = self.pool.allocate(self.blocks_per_row - full[parent])
            rows[place] = self.pool.fork(old_rows[parent][: full[parent]]) + own
        for place, parent in sorted([(place, parent) for place, parent, _ in given] + further):
            if lengths[parent] > 0 and lengths[parent] % self.block_size:
                copies.append((old_rows[parent][full[parent]], rows[place][full[parent]]))
        self.rows = rows
        return copies

    def _go_on_from(self, row: list[int], parent: list[int], full: int) -> list[int]:
        """``row`` with the first ``full`` blocks of ``parent`` instead of its own."""
        if row[:full] == parent[:full]:
            return row
        same = next(compress(count(), map(ne, row, parent)))
        shared = self.pool.fork(parent[same:full])
        self.pool.free(row[same:full])
        return row[:same] + shared + row[full:]

    def _require_room(self, wanted: int, leaving: Sequence[Sequence[int]]) -> None:
        """Refuse ``wanted`` blocks where so many are not free once the rows ``leaving`` are."""
        room = self.pool.num_free
        if wanted > room and leaving:
            holds = Counter(block for row in leaving for block in row)
            room += sum(self.pool.ref_count(block) == held for block, held in holds.items())
        if wanted > room:
            raise BlockPoolExhaustedError(wanted, room, self.pool.num_usable)
