"""generate() with left padding through a PagedCache, family by family: the logits of every new token equal
eager attention's.

Among them models whose forward makes a mask of ones where none comes (OPT, BioGPT, the BART-like), that build
masks no layer uses (Qwen2-MoE), whose chunks begin at a row's first token (Llama 4), and whose first layer
keeps no keys (LFM2, RecurrentGemma).
"""

import pytest
import torch
from families import build, same
from models import padded_prompts

from torchpaged import ArgumentError
from torchpaged.hf import PagedCache

FAMILIES = [
    "OPT",
    "BioGpt",
    "Bart",
    "Marian",
    "Pegasus",
    "GPT2",
    "GPTNeoX",
    "StableLm",
    "Qwen2Moe",
    "Gemma3",
    "GptOss",
    "Cohere2",
    "Llama4",
    "RecurrentGemma",
    "Lfm2",
]


@pytest.mark.parametrize("stem", FAMILIES)
def test_logits_equal_eager(stem: str) -> None:
    model = build(stem)
    same(model, padded_prompts(), lambda: PagedCache(model.config, 2, 32, block_size=4))


@pytest.mark.parametrize(
    "stem", ["Bart", "Qwen2Moe", "Llama4", "RecurrentGemma", "MiniCPM3", "DiffLlama", "JetMoe"]
)
def test_dense_logits_equal_eager(stem: str) -> None:
    model = build(stem)
    same(model, padded_prompts(), lambda: PagedCache(model.config, 2, 32, block_size=4, dense=True))


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
