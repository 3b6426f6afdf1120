"""Who holds the blocks of rows that fork, by their tables and chunks."""

from collections import Counter
from collections.abc import Iterable

from torchpaged.cache import requests
from torchpaged.cache.requests import CacheRequests


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
