"""An engine of one text at a time over a prefix cache with tiers below it: a block's content is known by its
text."""

from typing import Any

import torch

from torchpaged import PagedKVCache
from torchpaged.cache import KVLayerSpec, LatentLayerSpec, PrefixCache
from torchpaged.cache.disk_blocks import DiskBlocks
from torchpaged.cache.disk_tier import DiskTier
from torchpaged.cache.host_blocks import HostBlocks
from torchpaged.cache.host_tier import HostTier

SIZE = 4


class TieredEngine:
    """Texts computed one at a time: the content of a block is the sum of the tokens up to its end."""

    def __init__(self, num_blocks: int, num_slots: int, folder: Any = None, num_places: int = 0) -> None:
        specs = [KVLayerSpec(1, 4), LatentLayerSpec(4, 4)]
        self.cache = PagedKVCache(specs, block_size=SIZE, num_blocks=num_blocks, dtype=torch.float32)
        row_bytes = self.cache.bytes_per_block
        blocks = HostBlocks(self.cache, num_slots * row_bytes)
        if num_places:
            disk = DiskBlocks(folder, num_places * row_bytes, row_bytes)
            self.host: HostTier = DiskTier(blocks, disk)
        else:
            self.host = HostTier(blocks)
        self.prefixes = PrefixCache(self.cache.pool, SIZE, host=self.host)
        self.computed = 0

    def write(self, tokens: list[int], blocks: list[int], place: int) -> None:
        for pool in self.cache.tensors().values():
            pool[blocks[place]] = float(sum(tokens[: (place + 1) * SIZE]))

    def check(self, tokens: list[int], blocks: list[int], count: int) -> None:
        for place in range(count):
            for name, pool in self.cache.tensors().items():
                want = float(sum(tokens[: (place + 1) * SIZE]))
                assert (pool[blocks[place]] == want).all(), (name, place)

    def run(self, tokens: list[int], salt: Any = None) -> int:
        """Take, compute and leave; how many blocks were there."""
        text, pool = self.prefixes.text(tokens, salt), self.cache.pool
        blocks = text.take()
        assert blocks is not None
        text.promise()
        found = len(blocks)
        assert (text.arrival is not None) is (text.num_arriving > 0)
        blocks += pool.allocate(-(-len(tokens) // SIZE) - found)
        self.host.flush()
        if text.arrival is not None:
            text.arrival.wait()
            found = len(text._blocks) + text.num_arriving
        self.check(tokens, blocks, found)
        for place in range(found, len(tokens) // SIZE):
            self.write(tokens, blocks, place)
            self.computed += 1
        text.computed(len(tokens), blocks)
        text.leave()
        pool.free(blocks)
        self.check_books()
        return found

    def check_books(self) -> None:
        host = self.host
        check_slots(host)
        assert len(host) <= host.blocks.num_slots
        stats = self.prefixes.stats
        assert stats.queried_tokens == stats.hit_tokens + sum(stats.missed_tokens.values())


def check_slots(host: HostTier) -> None:
    """No slot and no place in a file has two blocks, and none is lost."""
    used = [*host._entries.values(), *host._free]
    if isinstance(host, DiskTier):
        returning = list(host._returning)
        assert host._reading <= {one.keys[place] for one in returning for place in one.cold}
        used += [slot for one in returning for slot in one.slots]
        used += host._clean.values()
        used += [slot for slot, _ in host._writing.values()]
        assert host._clean.keys() <= host._on_disk.keys()
        books = [host._entries, host._clean, host._writing]
        assert len(set().union(*books)) == sum(map(len, books)), "a block twice"
        places = [copy.place for copy in host._on_disk.values()] + host._free_places
        places += [copy.place for one in returning for copy in one.copies]
        places += [place for _, place in host._writing.values()]
        assert len(set(places)) == len(places) <= host.disk.num_slots
        assert all(place < host._next_place for place in places)
    assert sorted(used) == list(range(host.blocks.num_slots)), "a slot twice, or lost"
