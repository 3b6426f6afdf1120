"""Models without attention (Mamba, Mamba 2, Falcon Mamba) in a `PagedCache` and the engine: what differs
from hybrids. Their tokens every way: test_states.py and tests/engine/test_states.py."""

import copy
from typing import Any

import pytest
import torch
from model_coverage.architectures import config_of, model_of, with_random_weights
from model_coverage.checks import compiling
from model_coverage.hybrids import poison
from test_states import GREEDY, cached, prompts
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import BambaForCausalLM, DynamicCache

from torchpaged import ArgumentError, UnsupportedModelError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedCache, PagedModel, accelerate, attach, detach, paged, unaccelerate

NAMES = ("mamba", "mamba2", "falcon_mamba")


@pytest.mark.parametrize("name", NAMES)
def test_direct_forwards_with_padding(name: str) -> None:
    """Of the whole model, of its backbone, and of an attached backbone: the mask of all tokens tells the
    padding in the first forward, and in those behind."""
    call, model = prompts(), model_of(name, "eager")
    ids, mask = call["input_ids"], call["attention_mask"]
    with torch.no_grad():
        want = model.backbone(ids, attention_mask=mask, use_cache=False)[0]
        for part in (model, model.backbone):
            with paged(part):
                cache = cached(part)
                found = []
                for begin, end in ((0, 4), (4, 5), (5, 9), (9, 10), (10, 11)):
                    given = {"attention_mask": mask[:, :end], "cache_params": cache}
                    found.append(model.backbone(ids[:, begin:end], **given)[0])
                got = torch.cat(found, 1)[mask.bool()]
                assert cache.get_seq_length() == 11
        scale = float(want.abs().max())
        torch.testing.assert_close(got, want[mask.bool()], rtol=1e-4, atol=1e-4 * scale)


def test_the_cache_by_either_name() -> None:
    """``cache_params`` is transformers' name for it, ``past_key_values`` every other model's: with that one
    generate() goes on behind what is cached."""
    model, plain = attach(model_of("mamba2")), model_of("mamba2", "eager")
    ids = prompts(padding=0)["input_ids"]
    want = plain.generate(ids, **GREEDY)
    first = cached(model)
    assert torch.equal(model.generate(ids, **GREEDY, cache_params=first), want)
    second = cached(model)
    assert torch.equal(model.generate(ids, **GREEDY, past_key_values=second), want)
    longer = torch.cat((want, prompts(2, 7, 0)["input_ids"]), 1)
    got = model.generate(longer, **GREEDY, past_key_values=second)
    assert torch.equal(got, plain.generate(longer, **GREEDY))
    with torch.no_grad():
        assert isinstance(model(ids, past_key_values=cached(model), return_dict=False), tuple)
    detach(model)
    # transformers 5.24 makes a mask of another kind than the model takes
    with pytest.raises((ValueError, AttributeError), match="past_key_values|ndim"):
        model.generate(ids, **GREEDY, past_key_values=cached(attach(model_of("mamba2"))))


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_of_embeddings(name: str) -> None:
    model = model_of(name, "eager")
    call = {"inputs_embeds": model.get_input_embeddings()(prompts(padding=0)["input_ids"]).detach(), **GREEDY}
    want = model.generate(**call)
    with paged(model):
        assert torch.equal(model.generate(**call), want)
        assert torch.equal(model.generate(**call, past_key_values=cached(model)), want)


def test_what_a_mask_must_be() -> None:
    model = attach(model_of("mamba"))
    call, cache = prompts(), cached(model)
    with torch.no_grad():
        with pytest.raises(ArgumentError, match="left padding only"):
            model(call["input_ids"], attention_mask=call["attention_mask"].flip(1), past_key_values=cache)
        model(**call, past_key_values=cache)
        with pytest.raises(ArgumentError, match="a mask over all 13 tokens"):
            ones = torch.ones(2, 2, dtype=torch.int64)
            model(call["input_ids"][:, :2], attention_mask=ones, past_key_values=cache)
        with pytest.raises(ArgumentError, match="2 rows, as in this cache's first batch"):
            model(call["input_ids"][:1, :2], past_key_values=cache)


def test_a_compiled_step_finds_no_room_on_the_host() -> None:
    """As an error with the number to raise, not as an assertion of the device."""
    model = attach(model_of("mamba2"))
    counter = CompileCounterWithBackend("eager")
    cache = PagedCache(model.config, 2, 14)
    with pytest.raises(ArgumentError, match="max_seq_len: expected room for 15 tokens"):
        model.generate(**prompts(), **GREEDY | compiling(counter), past_key_values=cache)
    assert counter.frame_count == 1


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "blocks": ({"num_blocks": 20}, ArgumentError, "num_blocks: expected None for mamba2.*got 20"),
    "gathered keys": ({"dense": True}, UnsupportedModelError, "no keys to gather.*leave dense out"),
    "fp8": ({"kv_dtype": "fp8_e4m3"}, UnsupportedModelError, "no layer keeps keys and values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_cache_can_not_be(case: str) -> None:
    options, kind, why = REFUSED[case]
    with paged(model_of("mamba2")) as model, pytest.raises(kind, match=why):
        PagedCache(model.config, 2, 32, **options)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_is_not_attached(name: str) -> None:
    model = model_of(name, "torchpaged")
    with pytest.raises(UnsupportedModelError, match=f"^{name} keeps states alone.*attach"):
        PagedCache(model.config, 2, 32)


def test_what_a_cache_says() -> None:
    model = attach(model_of("mamba2"))
    cache = cached(model)
    assert (
        cache.describe() == "6 rows of 48 tokens; 2 layers with a state per row, made with the first tokens"
    )
    assert (cache.get_seq_length(), cache.batch_size, cache.is_compileable) == (0, -1, True)
    model.generate(**prompts(), **GREEDY, past_key_values=cache)
    size = sum(layer.num_bytes for layer in cache.states)
    assert size == 7 * 20_224  # seven slots: one of them is of no request
    assert repr(cache) == (
        "PagedCache(6 rows of 48 tokens, 2 layers with a state per row, 138.25 KiB, backend='cpu')"
    )
    poison(cache.states)
    cache.reset()
    with pytest.raises(Exception, match="can't be copied"):
        copy.deepcopy(cache)


def test_what_an_engine_allocates() -> None:
    """States of the requests and checkpoints, and nothing per token, however long a request may get."""
    sizes: dict[str, Any] = {"max_batch_size": 3, "block_size": 4, "num_checkpoints": 5}
    short, long = (Generator(model_of("mamba2"), max_seq_len=n, **sizes).model for n in (64, 4096))
    assert isinstance(short, PagedModel)
    assert short.kv_cache.num_bytes == long.kv_cache.num_bytes == 9 * 20_224
    assert sum(x.nbytes for x in short.kv_cache.tensors().values()) == 9 * 20_224
    assert short.kv_cache.describe() == (
        "states of 8 requests in 2 layers, 177.75 KiB (20224 bytes per request, float32); 49 blocks of 4 "
        "tokens = 192 tokens"
    )


def test_memory_for_states_alone() -> None:
    sizes: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 64, "block_size": 4}
    generator = Generator(model_of("mamba2"), kv_cache_memory=200_000, **sizes)
    assert generator.model.kv_cache.num_bytes <= 200_000
    with pytest.raises(ArgumentError, match="at least 80896 bytes.*of 3 requests"):
        Generator(model_of("mamba2"), kv_cache_memory=20_000, **sizes)


@pytest.mark.parametrize("way", ["generate", "compiled", "engine"])
def test_a_hybrid_without_any_attention(way: str) -> None:
    """It asks for masks all the same, which tell the padding."""
    config = config_of("bamba", {"attn_layer_indices": []})
    made = (BambaForCausalLM._from_config(copy.deepcopy(config)) for _ in range(2))
    plain, model = map(with_random_weights, made)
    call = prompts(padding=0 if way == "engine" else 6)
    want = plain.generate(**call, **GREEDY, use_cache=False)  # with its own cache it asks for keys
    if way == "engine":
        generator = Generator(model, max_batch_size=2, max_seq_len=48, block_size=4)
        sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
        found = generator.generate(call["input_ids"].tolist(), sampling)
        assert [output.token_ids for output in found] == want[:, 11:].tolist()
        return
    counter = CompileCounterWithBackend("eager")
    options = GREEDY | (compiling(counter) if way == "compiled" else {})
    with paged(model):
        assert torch.equal(model.generate(**call, **options, past_key_values=cached(model)), want)
    assert counter.frame_count == (way == "compiled")


def test_accelerated() -> None:
    model, ids = model_of("mamba2"), prompts(padding=0)["input_ids"]
    want, beams = model.generate(ids, **GREEDY), model.generate(ids, **GREEDY, num_beams=2)
    accelerate(model, max_batch_size=2, max_seq_len=48)
    try:
        assert torch.equal(model.generate(ids, **GREEDY), want)
        with pytest.warns(UserWarning, match="step by step"):
            assert torch.equal(model.generate(ids, **GREEDY, num_beams=2), beams)
        with pytest.raises(ArgumentError, match="cache_params: expected None on an accelerated model"):
            model.generate(ids, **GREEDY, cache_params=DynamicCache(config=model.config))
    finally:
        unaccelerate(model)
    assert torch.equal(model.generate(ids, **GREEDY), want)
