"""What people meet first: how objects print, and what they are told after natural mistakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchpaged import (
    ArgumentError,
    AttentionMetadata,
    BackendUnavailableError,
    BlockPool,
    Limits,
    PagedKVCache,
    open_session,
    select_backend,
)
from torchpaged.backends import Choice, Route
from torchpaged.custom_ops.words import counted, of_bytes, shortened
from torchpaged.graphs import DecodeGraphRunner


def pools(num_layers: int = 2, block_size: int = 16) -> PagedKVCache:
    options: dict[str, Any] = {"block_size": block_size, "num_blocks": 8, "dtype": torch.float32}
    return PagedKVCache.uniform(num_layers, 2, 64, **options)


def test_numbers_in_words() -> None:
    assert [counted(n, "block") for n in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]
    assert [of_bytes(n) for n in (0, 1, 1023, 1024)] == ["0 bytes", "1 byte", "1023 bytes", "1.00 KiB"]
    assert [of_bytes(n) for n in (3 * 2**20, 2**30, 2**40, 5 * 2**50)] == [
        "3.00 MiB",
        "1.00 GiB",
        "1.00 TiB",
        "5120.00 TiB",
    ]
    assert shortened(range(3)) == "[0, 1, 2]"
    assert shortened(range(100), 2) == "[0, 1, ... 100 in all]"


# ------------------------------------------------------------------------------------------------- reprs
def test_a_cache_and_its_requests() -> None:
    cache = pools()
    assert repr(cache) == "PagedKVCache(8 blocks of 16 tokens in 2 layers, 256.00 KiB, float32, on cpu)"
    assert cache.describe() == (
        "8 blocks of 16 tokens = 112 tokens in 2 layers, 256.00 KiB (2048 bytes per token, float32)"
    )
    assert "blocks of 1 token = 7 tokens in 1 layer, " in pools(1, 1).describe()
    rows = cache.allocate(2, max_seq_len=40)
    rows.append([17, 3])
    assert repr(rows) == "CacheRequests(seq_lens=[17, 3], num_blocks=[2, 1], block_size=16, max_seq_len=40)"
    assert repr(cache.pool) == "BlockPool(4 of 7 blocks free)"
    assert repr(BlockPool(2)) == "BlockPool(1 of 1 block free)"
    assert repr(cache[0]) == (
        "LayerKVCache(k_cache=[8, 16, 2, 64], v_cache=[8, 16, 2, 64], torch.float32, device='cpu')"
    )


def test_a_batch_is_short_and_reads_no_values() -> None:
    batch = AttentionMetadata.from_lists([1] * 99, [9] * 99, [[n, 0] for n in range(1, 100)], block_size=16)
    expected = "AttentionMetadata(num_reqs=99, num_tokens=99, max_query_len=1, block_size=16, device='cpu')"
    assert repr(batch) == expected
    assert repr(batch.to("meta")) == expected.replace("cpu", "meta")  # which has no values to read
    batch.tree_mask = batch.slot_mapping
    assert ", with tree_mask, " in repr(batch)


def test_a_runner_says_what_is_captured() -> None:
    runner = DecodeGraphRunner(
        lambda input_ids, metadata: input_ids[:, None].float(),
        max_batch_size=4,
        max_blocks_per_req=2,
        block_size=16,
        buckets=[1, 2, 4],
        device="cpu",
    )
    assert repr(runner) == "DecodeGraphRunner(buckets=[1, 2, 4], captured=[], device='cpu')"
    runner.capture([2])
    assert repr(runner) == "DecodeGraphRunner(buckets=[1, 2, 4], captured=[2], device='cpu')"


@pytest.fixture(scope="module")
def model(make_llama: Callable[..., Any]) -> Any:
    pytest.importorskip("transformers", reason="transformers is not installed")
    return make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)


def test_models_and_generators(model: Any) -> None:
    from torchpaged.engine import Generator

    generator = Generator(model, max_batch_size=2, max_seq_len=32, backend="reference", graphs=False)
    assert repr(generator) == (
        "Generator(LlamaForCausalLM, backend='reference', 0 requests, 4 of 4 blocks free, max_batch_size=2)"
    )
    generator.submit([1, 2, 3])
    assert "'reference', 1 request, 4 of 4 blocks" in repr(generator)
    assert repr(generator.model) == (
        "PagedModel(LlamaForCausalLM, backend='reference', 5 blocks of 16 tokens, on cpu)"
    )


def test_a_huggingface_cache_before_and_after_its_first_keys(model: Any) -> None:
    from torchpaged.hf import PagedCache

    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, max_batch_size=1, max_seq_len=32)
    assert cache.describe().endswith("paged layers, made with the first keys")
    size = "PagedCache(3 blocks of 16 tokens in 2 paged layers, "
    assert repr(cache) == f"{size}made with the first keys, backend not chosen yet)"
    model.generate(torch.tensor([[5, 6]]), past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert cache.describe().endswith("bytes per token)")
    assert repr(cache) == f"{size}24.00 KiB, backend={cache.backend.choice.name!r})"


def test_a_choice_tells_its_reason() -> None:
    short = Choice("cpu", Route("cpu", "cpu"), "backend='cpu' was given")
    assert repr(short) == "Choice('cpu', backend='cpu' was given)"
    automatic = repr(dataclasses.replace(short, reason="automatic for cpu (first choice; " + "word " * 30))
    assert automatic.startswith("Choice('cpu', automatic for cpu (first choice; word ")
    assert automatic.endswith(" ...)")
    assert len(automatic) <= 110


# ------------------------------------------------------------------------------------------------ mistakes
def test_no_backend_is_named_alike_everywhere(model: Any) -> None:
    """None is the automatic choice in every door."""
    from torchpaged.engine import Generator
    from torchpaged.hf import PagedCache, PagedModel

    named = PagedModel(model, num_blocks=4, backend=None).choice.name
    assert named == Generator(model, max_batch_size=1, max_seq_len=32, backend=None, graphs=False).choice.name
    PagedCache(model.config, 1, 32, backend=None)
    for door in (
        lambda name: PagedModel(model, num_blocks=4, backend=name),
        lambda name: Generator(model, backend=name),
        lambda name: PagedCache(model.config, 1, 32, backend=name),
    ):
        with pytest.raises(BackendUnavailableError, match="backend: expected one of auto, .* got 'nope'"):
            door("nope")
        with pytest.raises(ArgumentError, match="backend: expected a name, a Route"):
            door(7)


def test_a_name_where_a_spec_belongs() -> None:
    for door in (select_backend, lambda spec: open_session(spec, Limits())):
        with pytest.raises(ArgumentError, match="spec: expected at least one AttentionSpec, .* got 'cpu'"):
            door("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there() -> None:
    for door in (
        lambda: PagedKVCache.uniform(1, 1, 64, num_blocks=2, device="cuda"),
        lambda: AttentionMetadata.from_lists([1], [1], [[1]], block_size=16, device="cuda"),
    ):
        with pytest.raises(ArgumentError, match="device: expected a device of this machine, got 'cuda'; "):
            door()
    with pytest.raises(ArgumentError, match="device: expected a torch.device or its name"):
        PagedKVCache.uniform(1, 1, 64, num_blocks=2, device="gpu")


def test_pools_given_to_a_model_of_transformers(model: Any) -> None:
    words = r"models of transformers take a torchpaged.hf.PagedCache\(model.config, ...\)"
    with pytest.raises(AttributeError, match=words):
        model.generate(torch.tensor([[5, 6]]), past_key_values=pools(), max_new_tokens=2)
    assert not hasattr(pools(), "anything")


def test_one_number_for_several_requests() -> None:
    with pytest.raises(ArgumentError, match="query_lens: .* for each of 2 requests, got 7"):
        pools().allocate(2).append(7)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="for each of 1 request, got"):
        pools().allocate(1).append([1, 2])
