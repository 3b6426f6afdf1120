"""What people meet first: how objects print, and what they are told after natural mistakes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchpaged
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
        compile=False,
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
    with pytest.raises(ArgumentError, match=r"got tensor\(\[1, 2\]\); give a list: tensor.tolist"):
        pools().allocate(2).append(torch.tensor([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="blocks: expected a list of block ids, got 3"):
        BlockPool(9).free(3)  # type: ignore[arg-type]


def test_lengths_without_the_new_tokens() -> None:
    """The lengths that a request has before the step: its queries would see nothing, or too little."""
    with pytest.raises(
        ArgumentError, match="at least the 5 new tokens of row 1, got 0; count the new tokens"
    ):
        AttentionMetadata.from_lists([1, 5], [9, 0], [[1], []], block_size=16)
    with pytest.raises(ArgumentError, match="at least the 1 new token of row 0, got 0"):
        AttentionMetadata.from_lists([1], [0], [[1]], block_size=16)


def test_a_layer_that_is_not_there() -> None:
    with pytest.raises(IndexError, match="layer: expected one of 2 layers, got 2"):
        pools()[2]
    assert pools()[-1].k_cache.shape == (8, 16, 2, 64)


@pytest.mark.parametrize("mapping", [[1, 2], [(1, 2, 3)], [(1, 2), (3,)], ["12"], [(1.5, 2)]], ids=repr)
def test_blocks_to_copy_are_pairs(mapping: Any) -> None:
    cache = pools()
    cache[0].k_cache.copy_(torch.arange(8.0)[:, None, None, None].expand_as(cache[0].k_cache))
    with pytest.raises(ArgumentError, match="block_mapping: expected pairs "):
        torchpaged.copy_blocks(*cache[0][:2], mapping)
    torchpaged.copy_blocks(*cache[0][:2], [])
    assert cache[0].k_cache[:, 0, 0, 0].tolist() == list(range(8))
    torchpaged.copy_blocks(*cache[0][:2], iter([(1, 2)]))  # type: ignore[arg-type]
    assert cache[0].k_cache[2, 0, 0, 0] == 1


def test_a_step_that_gives_no_row_per_token() -> None:
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_blocks_per_req": 2, "block_size": 16, "compile": False}
    with pytest.raises(ArgumentError, match=r"step: expected a function, called as step\(.*\), got None"):
        DecodeGraphRunner(None, **sizes)  # type: ignore[arg-type]
    for output, came in (
        (None, "NoneType"),
        (torch.zeros(1, 9), r"shape \[1, 9\]"),
        (torch.tensor(1), "shape"),
    ):
        runner = DecodeGraphRunner(lambda ids, batch, out=output: out, **sizes)  # type: ignore[misc]
        with pytest.raises(ArgumentError, match=f"step: expected .* 2 rows for 2 tokens, got {came}"):
            runner.run([1, 2], [1, 1], [[1], [2]])
        assert not runner.is_captured(2)
    with pytest.raises(ArgumentError, match=r"buckets: expected some of \[1, 2, 4\], got \[3\]"):
        runner.capture([3])


def test_the_automatic_choice_lifts_an_outer_one() -> None:
    for name in (None, "auto"):
        with torchpaged.use_backend("reference"), torchpaged.use_backend(name):
            assert torchpaged.PagedAttention(4, 64).choice.reason.startswith("automatic")


def test_names_of_other_packages() -> None:
    hint = "no attribute 'Generator'; it is torchpaged.engine.Generator"
    with pytest.raises(AttributeError, match=hint):
        torchpaged.Generator  # type: ignore[attr-defined]
    for name, package in vars(torchpaged)["_ELSEWHERE"].items():
        assert hasattr(getattr(torchpaged, package), name)


def test_what_is_no_model(model: Any) -> None:
    from torchpaged.hf import PagedCache, paged

    for given, came in (("gpt2", "'gpt2'"), (torch.nn.Linear(2, 2), "Linear")):
        with pytest.raises(ArgumentError, match=f"model: expected a model of transformers, got {came}; "):
            paged(given).__enter__()  # type: ignore[arg-type]
    ids = torch.tensor([[5, 6]])
    cache = PagedCache(type(model.config)(**{**model.config.to_dict(), "attn_implementation": None}), 1, 32)
    model.set_attn_implementation("torchpaged")
    with pytest.raises(ArgumentError, match="make the cache with that model's own config"):
        model.generate(ids, past_key_values=cache, max_new_tokens=2)


def test_mistakes_at_a_generator(model: Any) -> None:
    from torchpaged.engine import Generator, SamplingParams

    with pytest.raises(TypeError, match=r"Generator\(\) got an unexpected keyword argument 'max_num_seqs'"):
        Generator(model, max_num_seqs=8)
    generator = Generator(model, max_batch_size=2, max_seq_len=32, backend="reference", graphs=False)
    for call in (
        lambda: generator.generate("hello"),
        lambda: generator.submit([5], SamplingParams(stop=".")),
    ):
        with pytest.raises(ArgumentError, match="None; make Generator\\(model, tokenizer\\)|stop: expected"):
            call()
    with pytest.raises(
        ArgumentError, match=r"a list of ids, or None for all, got 3; for one: \[request_id\]"
    ):
        generator.stream(3)  # type: ignore[arg-type]
