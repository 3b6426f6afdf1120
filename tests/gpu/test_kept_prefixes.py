"""What an engine on a GPU keeps beyond its pool: blocks on a disk, snapshots; and batches given as arrays."""

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from tiered_engine import check_slots

from torchpaged import AttentionMetadata
from torchpaged.cache.disk_tier import DiskTier
from torchpaged.engine import Generator, SamplingParams

pytestmark = pytest.mark.gpu
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(1, 499) for _ in range(RNG.randint(40, 300))] for _ in range(16)]
PARAMS = [
    SamplingParams(RNG.randint(20, 60), temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
    for i in range(len(PROMPTS))
]
SIZES: dict[str, Any] = {
    "max_batch_size": 8,
    "max_seq_len": 512,
    "buckets": [8],
    "prefill_buckets": None,
    "block_size": 16,
}


@pytest.fixture(scope="module")
def want(model: Any) -> list[list[int]]:
    with Generator(model, **SIZES, prefix_cache=False) as generator:
        return tokens_of(generator)


def tokens_of(generator: Generator) -> list[list[int]]:
    return [one.token_ids for one in generator.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("cold", [False, True], ids=["as written", "dropped from memory"])
def test_tokens_are_the_same_behind_a_disk(
    model: Any, want: list[list[int]], tmp_path: Path, cold: bool
) -> None:
    """Room for 90 blocks in the pool and few on the host: most of what comes back is read from the disk."""
    options = {**SIZES, "num_blocks": 90, "preemption": "swap", "host_cache_memory": 2**20}
    with Generator(model, **options, disk_cache_path=tmp_path, disk_cache_size=2**28) as generator:
        assert generator.prefix_cache is not None
        tier = generator.prefix_cache.host
        assert isinstance(tier, DiskTier)
        tier.recompute_seconds = None  # the disk is always faster
        for _ in range(3):
            assert tokens_of(generator) == want
            tier._settle_writes()
            if cold:
                tier.disk.forget_cached()
        assert generator.stats.prefix_cache.disk_tokens > 0
        assert not tier.errors
        check_slots(tier)


@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"], ids=str)
def test_tokens_behind_a_restore_are_those_without(model: Any, tmp_path: Path, kv_dtype: Any) -> None:
    options: dict[str, Any] = {**SIZES, "num_blocks": 1000}
    if kv_dtype is not None:
        options["kv_dtype"] = kv_dtype
    with Generator(model, **options) as first:
        expected = tokens_of(first)
        known = first.snapshot(tmp_path / "prefixes")
        if kv_dtype is not None:
            options["kv_scales"] = first.model.kv_scales
    assert known >= 16 * sum((len(prompt) - 1) // 16 for prompt in PROMPTS)
    with Generator(model, **options) as second:
        assert second.restore(tmp_path / "prefixes") == known
        assert tokens_of(second) == expected
        found = second.stats.prefix_cache.hit_tokens
        assert found == 16 * sum((len(prompt) - 1) // 16 for prompt in PROMPTS)


@pytest.mark.parametrize("code", ["i", "q"])
def test_a_batch_of_arrays_is_that_of_lists(code: str) -> None:
    """Copied without a wait, from memory that is gone by then."""
    lists = [1, 70, 100], [41, 70, 100], [[7, 2000, 2001], [5, 9, 6, 8, 4], [*range(10, 17)]]
    expected = AttentionMetadata.from_lists(*lists, block_size=16, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = []
        for _ in range(50):
            lens = [array(code, numbers) for numbers in lists[:2]]
            tables = [array(code, blocks) for blocks in lists[2]]
            batches.append(AttentionMetadata.from_lists(*lens, tables, block_size=16, device="cuda"))
            for numbers in (*lens, *tables):
                numbers[:] = array(code, [1] * len(numbers))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch in batches:
        for name, tensor in expected.tensors().items():
            assert torch.equal(getattr(batch, name), tensor), name
