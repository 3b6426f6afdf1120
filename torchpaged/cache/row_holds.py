"""RowHolds: how a row of `torchpaged.cache.requests.CacheRequests` holds its blocks, so that forks of long
rows cost little.

A fork makes chunks of `CHUNK` full blocks of its parent, each with a count of the rows that share it; a
further row is one more in each count. The pool sees one holder of a chunk's blocks, however many rows share
it. Blocks behind the chunks a row holds one by one, as everyone else does. Host data only.
"""

from torchpaged.cache.block_pool import BlockPool

#: Blocks.
CHUNK = 64


class RowHolds:
    """Of one row, whose table the caller keeps; at first it holds each block by itself."""

    def __init__(self) -> None:
        self._chunks: list[list[int]] = []  # of each a list of one number, how many rows share it

    def fork(self, pool: BlockPool, table: list[int], num_full: int) -> "tuple[list[int], RowHolds]":
        """Another row with the same blocks, the first ``num_full`` of which no row writes into."""
        twin, chunks = RowHolds(), self._chunks
        while (len(chunks) + 1) * CHUNK <= num_full:
            chunks.append([1])
        behind = pool.fork(table[len(chunks) * CHUNK :])
        for chunk in chunks:
            chunk[0] += 1
        twin._chunks = chunks.copy()
        return table[: len(chunks) * CHUNK] + behind, twin

    def free(self, pool: BlockPool, table: list[int], kept: int, num_full: int) -> None:
        """Give up all blocks but the first ``kept``, of which ``num_full`` stay full: the row may write into
        the others. The table is cut."""
        chunks = self._chunks
        pool.free(table[max(kept, len(chunks) * CHUNK) :])
        while len(chunks) * CHUNK > num_full:
            chunk = chunks.pop()
            first = len(chunks) * CHUNK
            end = max(first, min(kept, first + CHUNK))
            if chunk[0] == 1:
                pool.free(table[end : first + CHUNK])
            else:
                pool.fork(table[first:end])
                chunk[0] -= 1
        del table[kept:]
