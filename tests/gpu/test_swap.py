"""Blocks on their way between a GPU and pinned memory, while graphs replay and others take the blocks; and an
engine that puts requests back."""

import random
from typing import Any

import pytest
import torch
from captured import captured

from torchpaged import PagedKVCache
from torchpaged.cache import KVLayerSpec, LatentLayerSpec
from torchpaged.cache.host_blocks import HostBlocks
from torchpaged.custom_ops.block_ops import many_copies
from torchpaged.engine import Generator, SamplingParams

pytestmark = pytest.mark.gpu
CACHES: dict[str, tuple[list[Any], torch.dtype, int]] = {
    "bf16": ([KVLayerSpec(8, 128)] * 4, torch.bfloat16, 16),
    "e4m3": ([KVLayerSpec(8, 64)] * 4, torch.float8_e4m3fn, 16),
    "latents and keys": ([LatentLayerSpec(512, 64), KVLayerSpec(2, 64)], torch.bfloat16, 64),
    "odd widths, packed by torch": ([KVLayerSpec(1, 5, 3)] * 3, torch.float8_e4m3fn, 3),
}


@pytest.mark.parametrize("one_call", [True, False], ids=["one-call", "older-driver"])
@pytest.mark.parametrize("case", CACHES.values(), ids=CACHES)
def test_blocks_come_back_beside_replays(
    case: tuple[list[Any], torch.dtype, int], one_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are overwritten right behind `swap_out`, by a kernel and by a replayed graph."""
    if not one_call:
        monkeypatch.setattr(many_copies, "_call", lambda: None)
    elif not many_copies.can_copy_many():
        pytest.skip("a driver before CUDA 13")
    specs, dtype, block_size = case
    cache = PagedKVCache(specs, block_size=block_size, num_blocks=300, dtype=dtype, device="cuda")
    host = HostBlocks(cache, 300 * cache.bytes_per_block + 2**20)
    pools = [pool.view(torch.uint8).flatten(1) for pool in cache.tensors().values()]
    for pool in pools:
        pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8, device="cuda"))
    index = torch.zeros(100, dtype=torch.int64, device="cuda")

    def overwrite() -> None:
        for pool in pools:
            pool.index_fill_(0, index, 0x55)

    graph, _ = captured(overwrite)
    rng = random.Random(0)
    for _ in range(10):
        blocks, back = rng.sample(range(1, 300), 100), rng.sample(range(1, 300), 100)
        slots = rng.sample(range(host.num_slots), 100)
        want = [pool[blocks] for pool in pools]
        host.swap_out(blocks, slots)
        index.copy_(torch.tensor(blocks))
        graph.replay()
        arrival = host.swap_in(slots, back)
        arrival.wait()
        for pool, before in zip(pools, want, strict=True):
            assert torch.equal(pool[back], before)
        torch.cuda.synchronize()
        assert arrival.ready()


def test_tokens_are_the_same_whichever_way(model: Any) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 499) for _ in range(rng.randint(20, 300))] for _ in range(24)]
    params = [
        SamplingParams(rng.randint(50, 120), temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    sizes: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": 512, "buckets": [8], "prefill_buckets": None}
    want: list[list[int]] = []
    for policy in (None, "recompute", "swap", "auto"):
        options: dict[str, Any] = {}
        if policy is not None:
            options = {"num_blocks": 90, "preemption": policy, "host_cache_memory": 2**27}
        with Generator(model, **sizes, **options) as generator:
            got = [one.token_ids for _ in range(2) for one in generator.generate(prompts, params)]
            want = want or got
            assert got == want, policy
            assert (generator.stats.preemptions > 0) is (policy is not None)
