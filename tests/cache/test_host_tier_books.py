"""The host tier's books after a copy back that raises, and after all was forgotten."""

from typing import Any, cast

import pytest

from torchpaged.cache import BlockPool, PrefixCache
from torchpaged.cache.host_blocks import HostBlocks
from torchpaged.cache.host_tier import HostTier


class Broken:
    num_slots, bytes_per_block = 8, 1

    def swap_out(self, blocks: Any, slots: Any) -> None: ...

    def swap_in(self, slots: Any, blocks: Any) -> None:
        raise RuntimeError("out of memory")


def test_a_copy_back_that_raises_loses_no_slots() -> None:
    tier = HostTier(cast(HostBlocks, Broken()))
    tier.save(1, 1)
    tier.flush()
    with pytest.raises(RuntimeError):
        tier.load([1], [2])
    tier.clear()
    assert len(tier._free) == 8


def test_what_was_not_to_be_saved_is_forgotten_with_the_rest() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, 2, host=HostTier(cast(HostBlocks, Broken())))
    assert cache.host is not None
    for start, saved in ((0, 0), (10, 0), (20, 3)):
        text, blocks = cache.text(range(start, start + 6)), pool.allocate(3)
        cache.host.flush()
        text.computed(6, blocks)
        text.leave()
        pool.free(blocks)
        if not start:
            cache.save_none(blocks)
            cache.clear("reset")
        assert cache.host.saved_blocks == saved
