"""The load of bench_blocks.py, without a model: what its figures are of, and how much of the blocks in use
holds tokens."""

import statistics

import pytest
from bench_blocks import LOOKAHEAD, Load, hit_us, prefix_cache_us


@pytest.mark.parametrize("blocks_per_row", [66, 20], ids=["room", "short"])
@pytest.mark.parametrize("cached", [True, False])
def test_nearly_all_that_is_reserved_is_useful(cached: bool, blocks_per_row: int) -> None:
    """By what an engine on a GPU gives ahead of need."""
    load = Load(64, 64 * blocks_per_row, LOOKAHEAD, cached)
    load.run(500)
    assert (load.scheduler.preemptions > 0) == (blocks_per_row == 20)
    assert load.count > 100
    assert statistics.mean(load.utilisation[20:]) >= 0.96


def test_requests_of_the_prefix_cache_find_nothing_or_all() -> None:
    assert prefix_cache_us(num_requests=3)["blocks"] == 69
    assert hit_us(256) > 0
