"""Requests that fork: what is copied when they write, and what is refused; in any order: `cache_machine`."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch

from torchpaged import AttentionMetadata, PagedAttention, PagedKVCache
from torchpaged.cache import KVLayerSpec, LatentLayerSpec, StateLayerSpec
from torchpaged.custom_ops.errors import ArgumentError

BLOCK = 4


def make(spec: Any, dtype: torch.dtype, layers: int = 2) -> PagedKVCache:
    return PagedKVCache([spec] * layers, block_size=BLOCK, num_blocks=12, dtype=dtype)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (KVLayerSpec(2, 16), torch.float32),
        (KVLayerSpec(1, 16, 32), torch.float8_e4m3fn),
        (LatentLayerSpec(16, 8), torch.bfloat16),
    ],
)
def test_pools_of_every_layer_are_copied_once_per_step(
    spec: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make(spec, dtype)
    for tensor in cache.tensors().values():
        tensor.view(torch.uint8).copy_(torch.randint(0, 100, tensor.view(torch.uint8).shape))
    rows = cache.allocate(1)
    rows.append([6])
    forks = rows.fork([0, 0, 0])
    before = {name: tensor.view(torch.uint8).clone() for name, tensor in cache.tensors().items()}
    calls, copies = [], cache.copy_blocks
    monkeypatch.setattr(cache, "copy_blocks", lambda *args: (calls.append(args), copies(*args)))
    forks.append([1, 0, 1])
    assert len(calls) == 1
    assert forks.block_tables[1] == rows.block_tables[0]
    for name, tensor in cache.tensors().items():
        for row in (0, 2):
            own = forks.block_tables[row][1]
            assert own != rows.block_tables[0][1]
            assert torch.equal(tensor[own].view(torch.uint8), before[name][rows.block_tables[0][1]])
    rows.free()
    forks.append([0, 1, 0])  # alone with its block now
    assert len(calls) == 1


def test_samples_of_a_prompt_attend_as_if_each_were_alone() -> None:
    """In one table width, as a captured step has it, with NaN in what was never written."""
    torch.manual_seed(0)
    attention = PagedAttention(num_heads=4, head_dim=16, num_kv_heads=2, backend="reference")
    cache = make(KVLayerSpec(2, 16), torch.float32, 1)
    for tensor in cache.tensors().values():
        tensor.fill_(torch.nan)
    rows = cache.allocate(1, max_seq_len=12)

    def run(batch: AttentionMetadata, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        key_values = torch.randn(2, tokens, 2, 16)
        return attention(torch.ones(tokens, 4, 16), *key_values, cache[0], batch), key_values

    _, prompt = run(rows.append([6]), 6)
    samples, tail = rows.fork([0, 0, 0]), rows.block_tables[0][1]
    rows.free()
    texts = [prompt] * 3
    for _ in range(4):
        batch = samples.append([1, 1, 1])
        assert batch.block_table.shape == (3, 3)
        assert samples.block_tables[2][1] == tail, "the last that holds it needs no copy"
        out, new = run(batch, 3)
        texts = [torch.cat([text, new[:, row : row + 1]], 1) for row, text in enumerate(texts)]
        for row, (keys, values) in enumerate(texts):
            keys, values = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (keys, values))
            want = torch.nn.functional.scaled_dot_product_attention(torch.ones(4, 1, 16), keys, values)
            torch.testing.assert_close(out[row], want[:, 0], rtol=1e-5, atol=1e-5)
    assert cache.pool.num_used == 1 + 3 * 2  # a full block of the prompt, shared


def test_what_another_text_may_find_is_not_written() -> None:
    """A block that is kept is copied for a row that was cut within it, though no other row holds it."""
    cache = make(KVLayerSpec(1, 16), torch.float32)
    cache.pool.watch(lambda blocks, what: None)
    rows = cache.allocate(1)
    rows.append([BLOCK + 1])
    first = rows.block_tables[0][0]
    cache[0].k_cache[first] = 5
    cache.pool.keep([first], "text")
    rows.truncate([BLOCK - 1])
    rows.append([1])
    assert list(cache.pool.idle) == [first]
    assert cache[0].k_cache[rows.block_tables[0][0]].eq(5).all()


@pytest.mark.parametrize("parents", [[], [2], [-1], [0.0], [True], 3, torch.tensor([0])])
def test_parents_that_there_are_not(parents: Any) -> None:
    cache = make(KVLayerSpec(1, 16), torch.float32)
    rows = cache.allocate(2)
    rows.append([3, 5])
    with pytest.raises(ArgumentError, match="parents"):
        rows.fork(parents)
    assert [cache.pool.ref_count(block) for block in (1, 2, 3)] == [1, 1, 1]


def test_layers_whose_states_are_no_blocks_are_refused() -> None:
    specs = [KVLayerSpec(1, 16), StateLayerSpec(4, 8)]
    cache = PagedKVCache(specs, block_size=BLOCK, num_blocks=8, max_num_reqs=4)
    with pytest.raises(ArgumentError, match="copy_requests"):
        cache.allocate(1).fork()


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_cache_copies_blocks_of_its_own(twin: Any) -> None:
    cache = make(KVLayerSpec(1, 16), torch.float32)
    rows = cache.allocate(1)
    rows.append([2])
    cache[0].k_cache[1] = 5
    other, theirs = twin((cache, rows))
    forks = theirs.fork()
    forks.append([1])
    own = forks.block_tables[0][0]
    assert own != 1
    assert other[0].k_cache[own].eq(5).all()
    assert cache[0].k_cache[own].eq(0).all()


def test_requests_do_not_keep_their_cache_alive() -> None:
    """Its pools may be most of a GPU's memory: no reference cycle holds them."""
    gc.disable()
    try:
        cache = make(KVLayerSpec(1, 16), torch.float32)
        rows = cache.allocate(1)
        rows.append([2])
        forks = rows.fork()
        del cache
        with pytest.raises(ArgumentError, match="exists"):
            forks.append([1])
        assert forks.seq_lens == [2]
    finally:
        gc.enable()


def test_a_shallow_copy_takes_nothing_from_the_first() -> None:
    cache = PagedKVCache.uniform(1, 1, 16, block_size=BLOCK, num_blocks=8, dtype=torch.float32)
    rows = cache.allocate(1)
    rows.append([3])
    twin = copy.copy(cache)
    del twin
    gc.collect()
    rows.fork().append([1])
