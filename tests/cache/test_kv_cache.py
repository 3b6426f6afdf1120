"""PagedKVCache: shapes, memory arithmetic, budgets; AttentionMetadata: hand-checked batches and refusals."""

from typing import Any

import pytest
import torch

from torchpaged import ArgumentError, AttentionMetadata, BlockPool, PagedKVCache
from torchpaged.cache import KVLayerSpec, LatentLayerSpec


def test_arithmetic_by_hand() -> None:
    cache = PagedKVCache(
        [KVLayerSpec(3, 64), KVLayerSpec(1, 32, 16)], block_size=16, num_blocks=10, dtype=torch.bfloat16
    )
    assert cache.bytes_per_token == (3 * 128 + 48) * 2
    assert cache.num_tokens == 9 * 16
    assert (
        cache.num_bytes
        == 10 * 16 * cache.bytes_per_token
        == sum(t.nbytes for pools in cache for t in pools[:2])
    )
    assert cache[1].k_cache.shape == (10, 16, 1, 32)
    assert cache[1].v_cache.shape == (10, 16, 1, 16)
    assert "10 blocks of 16 tokens = 144 tokens in 2 layers" in cache.describe()
    assert "864 bytes per token" in cache.describe()


def test_a_budget_is_not_exceeded() -> None:
    budget = 1_000_000
    cache = PagedKVCache.uniform(2, 2, 32, block_size=16, memory_budget=budget, dtype=torch.float32)
    one_block = 16 * cache.bytes_per_token
    assert budget - one_block < cache.num_bytes <= budget


def test_pools_that_do_not_fit_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"num_blocks: expected pools that fit into the .* GiB of cpu"):
        PagedKVCache.uniform(2, 2, 32, num_blocks=10**12)

    def full(*shape: int, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    refused = r"num_blocks: expected pools that fit into what is free of cpu, got 10 blocks of 8,192 bytes"
    with pytest.raises(ArgumentError, match=refused):
        PagedKVCache.uniform(2, 2, 32, num_blocks=10, dtype=torch.bfloat16)


def test_fp8_pools_carry_scales() -> None:
    pools = PagedKVCache.uniform(1, 2, 8, num_blocks=2, dtype=torch.float8_e4m3fn)[0]
    assert pools.k_scale is not None
    assert pools.k_scale.dtype == torch.float32
    assert float(pools.v_scale) == 1.0


def test_pools_made_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        cache = PagedKVCache.uniform(1, 1, 4, num_blocks=2, dtype=torch.float32)
    cache[0].k_cache.fill_(1.0)
    assert not cache[0].k_cache.is_inference()


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("num_blocks", {}),
        ("num_blocks", {"num_blocks": 4, "memory_budget": 10**6}),
        ("num_blocks", {"num_blocks": 1}),
        ("memory_budget", {"memory_budget": 100}),
        ("block_size", {"num_blocks": 4, "block_size": 0}),
        ("block_size", {"num_blocks": 4, "block_size": 1.5}),
        ("num_blocks", {"num_blocks": 4.5}),
        ("num_blocks", {"num_blocks": "4"}),
        ("memory_budget", {"memory_budget": "1GB"}),
        ("memory_budget", {"memory_budget": 1e6}),
        ("num_layers", {"num_blocks": 4, "num_layers": 1.5}),
        ("num_kv_heads", {"num_blocks": 4, "num_kv_heads": 0}),
        ("num_kv_heads", {"num_blocks": 4, "num_kv_heads": None}),
        ("head_dim", {"num_blocks": 4, "head_dim": 2.5}),
        ("head_dim_v", {"num_blocks": 4, "head_dim_v": 0}),
        ("dtype", {"num_blocks": 4, "dtype": "bf16"}),
        ("dtype", {"num_blocks": 4, "dtype": None}),
    ],
)
def test_bad_sizes(argument: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}: expected"):
        PagedKVCache.uniform(**{"num_layers": 1, "num_kv_heads": 1, "head_dim": 8} | options)


def test_other_arguments_of_another_kind() -> None:
    spec = KVLayerSpec(1, 8)
    for argument, call in (
        ("layers", lambda: PagedKVCache(spec, num_blocks=4)),
        ("num_blocks", lambda: BlockPool(2.5)),
        ("kv_lora_rank", lambda: LatentLayerSpec(1.5, 2)),
        ("qk_rope_head_dim", lambda: LatentLayerSpec(16, 0)),
    ):
        with pytest.raises(ArgumentError, match=f"^{argument}: expected"):
            call()


def test_metadata_by_hand() -> None:
    """A decode at position 16, a prefill of 3, two more of 4, an empty one."""
    m = AttentionMetadata.from_lists(
        [1, 3, 2, 0], [17, 3, 4, 0], [[4, 7], [9], [2], []], block_size=16, num_blocks=10
    )
    assert m.query_start_loc.tolist() == [0, 1, 4, 6, 6]
    assert m.seq_lens.tolist() == [17, 3, 4, 0]
    assert m.slot_mapping.tolist() == [7 * 16, 144, 145, 146, 34, 35]
    assert m.positions.tolist() == [16, 0, 1, 2, 2, 3]
    assert m.block_table.tolist() == [[4, 7], [9, 0], [2, 0], [0, 0]]
    assert m.max_query_len == 3
    assert (m.num_reqs, m.num_tokens) == (4, 6)


@pytest.mark.parametrize(
    ("argument", "query_lens", "seq_lens", "tables"),
    [
        ("block_tables", [1], [17], [[3]]),
        ("block_tables", [1], [3], [[0]]),
        ("block_tables", [1], [3], [[10]]),
        ("block_tables", [1, 1], [3, 3], [[1]]),
        ("seq_lens", [1], [-3], [[1]]),
        ("seq_lens", [4], [3], [[1]]),
    ],
)
def test_bad_batches(
    argument: str, query_lens: list[int], seq_lens: list[int], tables: list[list[int]]
) -> None:
    with pytest.raises(ArgumentError, match=argument):
        AttentionMetadata.from_lists(query_lens, seq_lens, tables, block_size=16, num_blocks=10)


def test_a_table_too_narrow() -> None:
    with pytest.raises(ArgumentError, match="at most 1 block per"):
        AttentionMetadata.from_lists([1], [17], [[1, 2]], block_size=16, max_blocks_per_req=1)
