"""Padding read for a forward that raised before it wrote: the next forward's is right without `reset()`."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import build, logits_of, same
from models import padded_prompts
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from torchpaged import ArgumentError, UnsupportedModelError
from torchpaged.hf import PagedCache
from torchpaged.hf.call_mask import MaskRequest

#: OPT makes a mask of ones where none comes, Gemma 3 asks for two kinds, Llama 4's masks are never made ahead
#: of a forward.
STEMS = ["OPT", "Gemma3", "Llama4", "Bart"]


class Broken(Exception):
    pass


def interrupt(model: PreTrainedModel) -> Any:
    """The first layer raises: masks were asked for, nothing is written."""

    def fail(*_: object) -> None:
        raise Broken

    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    return layers[0].register_forward_pre_hook(fail)


def broken(stem: str, how: str) -> tuple[PreTrainedModel, PagedCache, Tensor]:
    """A model, a cache behind a left-padded forward that raised before its first write, and a prompt of the
    same shape without padding."""
    model, inputs = build(stem, implementation="torchpaged"), padded_prompts()
    cache = PagedCache(model.config, 2, 32, block_size=4)
    hook = interrupt(model)
    with pytest.raises(Broken), torch.no_grad():
        if how == "generate":
            model.generate(**inputs, max_new_tokens=2, past_key_values=cache)
        else:
            model(**inputs, past_key_values=cache)
    hook.remove()
    ids = torch.randint(3, 99, inputs["input_ids"].shape, generator=torch.Generator().manual_seed(2))
    return model, cache, ids


@pytest.mark.parametrize("how", ["generate", "forward"])
@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize("stem", STEMS)
def test_generate_after_it(stem: str, with_mask: bool, how: str) -> None:
    model, cache, ids = broken(stem, how)
    inputs = {"input_ids": ids, **({"attention_mask": torch.ones_like(ids)} if with_mask else {})}
    want = logits_of(model, inputs)
    torch.testing.assert_close(logits_of(model, inputs, cache), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["generate", "forward"])
@pytest.mark.parametrize("stem", STEMS)
def test_a_forward_after_it(stem: str, how: str) -> None:
    """A forward without a mask: nothing is padded, whatever was prepared before."""
    model, cache, ids = broken(stem, how)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["generate", "forward"])
@pytest.mark.parametrize("stem", STEMS)
def test_other_padding_after_it(stem: str, how: str) -> None:
    model, cache, ids = broken(stem, how)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with torch.no_grad():
        want = model(ids, attention_mask=mask, use_cache=False).logits[:, -1]
        got = model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("broken_first", [False, True])
def test_a_decoder_with_an_encoder(broken_first: bool) -> None:
    """transformers 5.17 makes no mask ahead of a decoder that is given none."""
    model = build("Bart", "ForConditionalGeneration", "torchpaged")
    cache = EncoderDecoderCache(
        PagedCache(model.config, 2, 32, block_size=4), DynamicCache(config=model.config)
    )
    source, prompt = {"input_ids": torch.randint(3, 99, (2, 12))}, padded_prompts()
    prompt["input_ids"][:, 0] = 1  # the start token, which generate() would put in front of the padding
    if broken_first:
        hook = interrupt(model.model.decoder)
        with pytest.raises(Broken):
            padded = {
                "decoder_input_ids": prompt["input_ids"],
                "decoder_attention_mask": prompt["attention_mask"],
            }
            model.generate(**source, **padded, max_new_tokens=2, past_key_values=cache)
        hook.remove()
    given = {**source, "decoder_input_ids": torch.randint(3, 99, prompt["input_ids"].shape)}
    given["decoder_input_ids"][:, 0] = 1
    want = logits_of(model, given)
    try:
        torch.testing.assert_close(logits_of(model, given, cache), want, rtol=1e-4, atol=1e-4)
    except ArgumentError as error:
        assert broken_first
        assert "cache.reset()" in str(error)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_after_it(copied: Callable[[PagedCache], PagedCache]) -> None:
    model, cache, ids = broken("OPT", "generate")
    with torch.no_grad():
        got = model(ids, past_key_values=copied(cache)).logits
        torch.testing.assert_close(got, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def prompts_with_positions() -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = padded_prompts()
    return {**inputs, "position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)}


@pytest.mark.parametrize("stem", STEMS)
def test_inputs_prepared_by_hand(stem: str) -> None:
    """As in a decode loop of the user's own."""
    model, inputs = build(stem, implementation="torchpaged"), prompts_with_positions()
    cache = PagedCache(model.config, 2, 32, block_size=4)
    with torch.no_grad():
        want = model(**inputs, use_cache=False).logits[:, -1]
        prepared = model.prepare_inputs_for_generation(**inputs, past_key_values=cache, use_cache=True)
        torch.testing.assert_close(model(**prepared).logits[:, -1], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stem", ["OPT", "Gemma3"])
def test_inputs_prepared_for_another_forward(stem: str) -> None:
    """What was prepared ahead of `reset` has padding that the rows have not."""
    model, inputs = build(stem, implementation="torchpaged"), prompts_with_positions()
    cache = PagedCache(model.config, 2, 32, block_size=4)
    with torch.no_grad():
        prepared = model.prepare_inputs_for_generation(**inputs, past_key_values=cache, use_cache=True)
        cache.reset()
        with pytest.raises(UnsupportedModelError, match="left padding .* where the cache has None"):
            model(**prepared)


def asked(query_len: int, mask: Tensor | None = None, local_size: int | None = None) -> MaskRequest:
    return MaskRequest(2, query_len, 32, mask, None, local_size)


def test_masks_that_differ_within_a_forward() -> None:
    """Padding in one kind of mask and none in the other one is nothing that rows of one length can hold."""
    cache = PagedCache(build("Gemma3").config, 2, 32)
    cache.masks.observe(asked(20, padded_prompts()["attention_mask"]))
    with pytest.raises(UnsupportedModelError, match="masks the padding of some layers"):
        cache.masks.observe(asked(20, local_size=16))


def test_a_forward_longer_than_prepared() -> None:
    """A model that puts tokens of its own in front of the prompt: where its padding lies then, the mask ahead
    of it did not say."""
    cache = PagedCache(build("OPT").config, 2, 32)
    cache.masks.observe(asked(20, padded_prompts()["attention_mask"]))
    keys = torch.zeros(2, 4, 24, 8)
    with pytest.raises(UnsupportedModelError, match="24 tokens per row where 20 were prepared"):
        cache.update(keys, keys, 0)
    cache.masks.observe(asked(20, padded_prompts()["attention_mask"]))
    cache.masks.observe(asked(24))  # of another forward
    assert cache.masks.expected.take(2, 24) is None


@pytest.mark.parametrize("stem", ["OPT", "Qwen2Moe", "Llama4"])
def test_a_forward_called_directly(stem: str) -> None:
    model, inputs = build(stem), padded_prompts()
    with torch.no_grad():
        want = model(**inputs, use_cache=False).logits[:, -1]
        model.set_attn_implementation("torchpaged")
        got = model(**inputs, past_key_values=PagedCache(model.config, 2, 32)).logits[:, -1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_chunked_prefill_of_a_model_that_makes_masks_of_ones() -> None:
    model = build("OPT")
    same(model, padded_prompts(), lambda: PagedCache(model.config, 2, 32, block_size=4), prefill_chunk_size=4)


def test_padding_of_a_refused_forward_is_forgotten() -> None:
    """A refused batch leaves no padding behind for the next one, which comes without a mask."""
    model, inputs = build("OPT"), padded_prompts()
    cache = PagedCache(model.config, 1, 32)
    model.set_attn_implementation("torchpaged")
    with torch.no_grad():
        with pytest.raises(ArgumentError, match="max_batch_size"):
            model(**inputs, past_key_values=cache)
        ids = inputs["input_ids"][:1]
        got = model(ids, past_key_values=cache).logits
        torch.testing.assert_close(got, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_padding_of_another_shape_is_forgotten() -> None:
    """The forward before failed in the model's own code, after its mask was read and before anything
    was written."""
    model, inputs = build("OPT"), padded_prompts()
    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, 2, 32)
    broken = {**inputs, "input_ids": inputs["input_ids"] + 1000}
    with torch.no_grad():
        with pytest.raises(IndexError):
            model.generate(**broken, max_new_tokens=2, past_key_values=cache)
        ids = inputs["input_ids"][:, :9]
        got = model(ids, past_key_values=cache).logits
        torch.testing.assert_close(got, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)
