"""The second GPU while the first is the current device: attention by every door, blocks that are swapped, an
engine's tokens. What the first GPU gives is what the second must give."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

import torchpaged
from torchpaged import AttentionMetadata, PagedAttention, PagedKVCache
from torchpaged.backends import get_backend
from torchpaged.cache import KVLayerSpec, LatentLayerSpec
from torchpaged.cache.host_blocks import HostBlocks
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedCache, attach
from torchpaged.layers import MLAAttention
from torchpaged.testing import conformance_checks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
FIRST, SECOND = "cuda:0", "cuda:1"
LENGTHS = [(1, 40), (1, 300), (17, 33), (5, 5)]
SIZES: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": 512, "block_size": 16}


@pytest.fixture(autouse=True)
def _the_first_stays_current() -> Iterator[None]:
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("mode", ["eager", "captured"])
@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_a_backend_conforms(name: str, mode: str) -> None:
    backend = get_backend(name)
    if backend.unavailable():
        pytest.skip(str(backend.unavailable()))
    batches = ["decode_edges", "speculative"] if mode == "captured" else ["decode_edges", "chunked"]
    plain: dict[str, Any] = {"variants": {"causal": {}}, "extras": {"plain": {}}, "lse": [True]}
    shape: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
    checks = conformance_checks(backend, device=SECOND, modes=[mode], batches=batches, **plain, **shape)
    assert [(check.name, check.run()) for check in checks] == [
        (f"{mode} {batch} causal plain", "") for batch in batches
    ]


def keys_and_values(device: str) -> Iterator[Tensor]:
    """A module that writes and attends, and the function, over decodes alone and prompts."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    layer = PagedAttention(8, 64, 2, device=device, dtype=dtype)
    pools = [torch.randn(64, 16, 2, 64).to(device, dtype) for _ in range(2)]
    for lengths in (LENGTHS, [(1, context) for _, context in LENGTHS]):
        queries, contexts = zip(*lengths, strict=True)
        tables = [list(range(1 + 20 * (row % 3), 1 + 20 * (row % 3) + 19)) for row in range(len(lengths))]
        batch = AttentionMetadata.from_lists(queries, contexts, tables, block_size=16, device=device)
        query, key, value = (torch.randn(sum(queries), n, 64).to(device, dtype) for n in (8, 2, 2))
        yield layer(query, key, value, tuple(pools), batch)
        tensors = (batch.block_table, batch.seq_lens, batch.query_start_loc)
        yield torchpaged.paged_attention(query, *pools, *tensors, max_query_len=max(queries))
    yield from pools


def latents(device: str) -> Iterator[Tensor]:
    torch.manual_seed(0)
    dtype = torch.bfloat16
    layer = MLAAttention(16, 128, 64, 128, kv_lora_rank=512, device="cpu", dtype=dtype)
    layer.kv_b_proj.weight.data.normal_(std=0.05)
    layer = layer.requires_grad_(False).to(device)
    cache = PagedKVCache([LatentLayerSpec(512, 64)], num_blocks=64, block_size=16, dtype=dtype, device=device)
    rows = cache.allocate(len(LENGTHS))
    for queries in ([40, 300, 33, 5], [1, 1, 1, 1], [1, 3, 4, 2]):
        batch = rows.append(queries)
        tokens = sum(queries)
        query, kv_c, k_pe = (torch.randn(tokens, *n).to(device, dtype) for n in ((16, 192), (512,), (64,)))
        yield layer(query, kv_c, k_pe, cache[0], batch)
    yield from cache.tensors().values()


@pytest.mark.parametrize("doors", [keys_and_values, latents])
def test_attention_is_the_same(doors: Callable[[str], Iterator[Tensor]]) -> None:
    first, second = list(doors(FIRST)), list(doors(SECOND))
    for n, (a, b) in enumerate(zip(first, second, strict=True)):
        assert b.device == torch.device(SECOND)
        assert torch.equal(a.cpu(), b.cpu()), n
        assert a.any(), n


def test_blocks_are_swapped_in_order() -> None:
    """Blocks are overwritten right behind `swap_out`, on the stream of their device."""
    specs = [KVLayerSpec(8, 128)] * 4
    cache = PagedKVCache(specs, block_size=16, num_blocks=300, dtype=torch.bfloat16, device=SECOND)
    host = HostBlocks(cache, 300 * cache.bytes_per_block + 2**20)
    pools = [pool.view(torch.uint8).flatten(1) for pool in cache.tensors().values()]
    for pool in pools:
        pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8, device=SECOND))
    rng = random.Random(0)
    for _ in range(10):
        blocks, back = rng.sample(range(1, 300), 100), rng.sample(range(1, 300), 100)
        slots = rng.sample(range(host.num_slots), 100)
        want = [pool[blocks] for pool in pools]
        index = torch.tensor(blocks, device=SECOND)
        for pool, before in zip(pools, want, strict=True):  # copies that do not wait would find zeros
            pool.index_fill_(0, index, 0)
            for _ in range(20):
                pool[index] = before
        host.swap_out(blocks, slots)
        for pool in pools:
            pool.index_fill_(0, index, 0x55)
        arrival = host.swap_in(slots, back)
        arrival.wait()
        for pool, before in zip(pools, want, strict=True):
            assert torch.equal(pool[back], before)
        torch.cuda.synchronize(SECOND)
        assert arrival.ready()


PREEMPTED: dict[str, Any] = {"num_blocks": 90, "preemption": "swap", "host_cache_memory": 2**27}
ENGINES: dict[str, dict[str, Any]] = {
    "graphs": {"buckets": [4, 8]},
    "launched from Python": {"graphs": False},
    "prompts from Python": {"buckets": [8], "prefill_buckets": None, "steps_per_launch": 4},
    "compiled": {"buckets": [8], "compile": True, "prefill_buckets": None},
    "fused": {"buckets": [8], "fuse": True},
    "swapped": {"buckets": [8], "prefill_buckets": None, **PREEMPTED},
    "swapped, launched from Python": {"graphs": False, **PREEMPTED},
}


def load() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(0)
    begin = [rng.randrange(1, 499) for _ in range(64)]
    prompts = [
        [*begin * (index % 3 == 0), *(rng.randrange(1, 499) for _ in range(rng.randint(20, 300)))]
        for index in range(24)
    ]
    params = [
        SamplingParams(rng.randint(40, 90), temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.fixture(scope="module")
def models(model: Any) -> dict[str, Any]:
    return {FIRST: model.to(FIRST), SECOND: copy.deepcopy(model).to(SECOND)}


@pytest.mark.parametrize("background", [False, True], ids=["steps here", "a thread makes the steps"])
@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_the_same(models: dict[str, Any], name: str, background: bool) -> None:
    prompts, params = load()
    tokens = []
    for device in (FIRST, SECOND):
        with Generator(models[device], **SIZES, **ENGINES[name]) as generator:
            if background:
                generator.start()
            tokens.append([one.token_ids for _ in range(2) for one in generator.generate(prompts, params)])
            if "preemption" in ENGINES[name]:
                assert generator.stats.preemptions > 0
            assert generator.stats.prefix_cache.hit_tokens > 0
    assert tokens[0] == tokens[1]
    assert tokens[1][: len(prompts)] == tokens[1][len(prompts) :]


@pytest.mark.parametrize("fuse", [False, True], ids=["as it is", "fused"])
@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2", "deepseek_v3", "deepseek_v32", "gemma2"])
def test_tokens_of_other_layers_are_the_same(name: str, fuse: bool) -> None:
    """States, latents, an index, windows; more requests than rows."""
    from model_coverage.architectures import model_of

    prompts = [[(7 * i + 3 * j) % 90 + 5 for j in range(n)] for i, n in enumerate((5, 23, 1, 40, 12))]
    tokens = []
    for device in (FIRST, SECOND):
        model = model_of(name).eval().to(device)
        if hasattr(model, "set_experts_implementation"):  # in float32 the grouped product synchronises
            model.set_experts_implementation("batched_mm")
        if name.startswith("deepseek"):
            attach(model)
        sizes: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 64, "block_size": 16, "fuse": fuse}
        with Generator(model, **sizes) as generator:
            outputs = generator.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
            tokens.append([output.token_ids for output in outputs])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_generate_over_a_paged_cache(models: dict[str, Any], compiled: bool) -> None:
    """transformers' own loop; it compiles decode steps, with CUDA graphs of torch's."""
    ids = torch.randint(3, 499, (3, 50), generator=torch.Generator().manual_seed(0))
    tokens = []
    for device in (FIRST, SECOND):
        torch._dynamo.reset()
        model = copy.deepcopy(models[device])
        model.set_attn_implementation("torchpaged")
        cache = PagedCache(model.config, 3, 128)
        options = {"do_sample": False, "disable_compile": not compiled, "eos_token_id": None}
        given = {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}
        out = model.generate(**given, past_key_values=cache, max_new_tokens=40, **options)
        assert out.device == torch.device(device)
        tokens.append(out.cpu())
    assert torch.equal(tokens[0], tokens[1])
