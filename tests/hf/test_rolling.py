"""Layers with a window keep the blocks of their window: right tokens and logits, however long rows are."""

from typing import Any

import pytest
import torch
import transformers
from models import COMMON, padded_prompts, tiny
from torch import Tensor
from transformers import PreTrainedModel

import torchpaged.hf
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf import PagedCache

MODELS = {
    "Mistral": {},
    "Gemma2": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "GptOss": {},
}
SIZES: dict[str, Any] = {"block_size": 4, "sliding_step": 5}


def paged(name: str, **options: Any) -> PreTrainedModel:
    model = tiny(name, **{**MODELS.get(name, {}), **options})
    model.set_attn_implementation("torchpaged")
    return model


def rolling(cache: PagedCache) -> list[bool]:
    return [layer.rolls for layer in cache.paged]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 6}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_eager_tokens(name: str, options: dict[str, Any]) -> None:
    """Prompts longer than a ring, left padding, beams, chunked prefills."""
    call = {**padded_prompts(length=30), "max_new_tokens": 20, "do_sample": False, **options}
    want = tiny(name, **MODELS[name]).generate(**call)
    model = paged(name)
    cache = PagedCache(model.config, 6, 64, **SIZES)
    assert torch.equal(model.generate(**call, past_key_values=cache), want)
    windows = [layer.window for layer in cache.paged]
    assert rolling(cache) == [window is not None for window in windows]
    assert any(rolling(cache))


@pytest.mark.slow_cases("Gemma2-3072")
@pytest.mark.parametrize(("name", "length"), [("Mistral", 10_240), ("Gemma2", 3_072)])
def test_memory_is_flat_over_thousands_of_tokens(name: str, length: int) -> None:
    """The pools of layers with a window, and the blocks in them that hold tokens, stay what they were at the
    start; the newest logits are those of a model that sees all."""
    step = 512
    model = paged(name, num_hidden_layers=2, layer_types=None, max_position_embeddings=length)
    ids = torch.randint(3, 99, (1, length), generator=torch.Generator().manual_seed(3))
    cache = PagedCache(model.config, 1, length, block_size=16, sliding_step=64)
    short = PagedCache(model.config, 1, 256, block_size=16, sliding_step=64)
    used = []
    with torch.no_grad():
        model(ids[:, :64], past_key_values=short)
        for start in range(0, length, step):
            out = model(ids[:, start : start + step], past_key_values=cache, logits_to_keep=4)
            layer = cache.paged[0]
            used.append(int((layer.keys.flatten(1).abs().sum(1) > 0).sum()))
        if all(rolling(cache)):
            # In two layers a window of 8 reaches 14 tokens back.
            position = torch.arange(length - 200, length)[None]
            eager = tiny(name, num_hidden_layers=2, layer_types=None, max_position_embeddings=length)
            want = eager(ids[:, -200:], position_ids=position, logits_to_keep=4).logits
        else:
            every = PagedCache(model.config, 1, length, sliding_step=length)
            want = model(ids, past_key_values=every, logits_to_keep=4).logits
            assert not any(rolling(every))
    torch.testing.assert_close(out.logits, want, atol=1e-4, rtol=1e-4)
    assert rolling(cache)[0]
    assert set(used) == {cache.rows.rolling.blocks.blocks_per_ring} == {6}
    assert [layer.num_bytes for layer in cache.paged if layer.rolls] == [
        layer.num_bytes for layer in short.paged if layer.rolls
    ]


def test_fp8_pools_and_fused_layers() -> None:
    call = {**padded_prompts(length=30), "max_new_tokens": 16, "do_sample": False}
    options = {"kv_dtype": "fp8_e4m3", "kv_scales": "head"}
    model = paged("Mistral")
    want = model.generate(**call, past_key_values=PagedCache(model.config, 2, 64, sliding_step=64, **options))
    torchpaged.hf.fuse(model)
    cache = PagedCache(model.config, 2, 64, **SIZES, **options)
    assert torch.equal(model.generate(**call, past_key_values=cache), want)
    assert all(rolling(cache))


def test_compiled_steps_take_one_graph() -> None:
    ids = padded_prompts(length=20, padding=0)["input_ids"]
    shape: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    want = tiny("Gemma2", **shape).generate(ids, max_new_tokens=24, do_sample=False)
    model, graphs = paged("Gemma2", **shape), []

    def backend(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    cache = PagedCache(model.config, 2, 64, **SIZES)
    torch._dynamo.reset()
    step = torch.compile(model.forward, backend=backend, fullgraph=True)
    with torch.no_grad():
        out = model(ids, past_key_values=cache)
        for length in range(20, 44):
            token = out.logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, token], 1)
            out = step(token, position_ids=torch.full((2, 1), length), past_key_values=cache)
    assert torch.equal(ids, want)
    assert rolling(cache) == [True, False]
    assert len(graphs) == 1


def test_turns_and_cuts() -> None:
    """Tokens are taken back as far as the rings reach; further is refused, and nothing is changed."""
    model, eager = paged("Mistral"), tiny("Mistral")
    ids = torch.randint(3, 99, (2, 60), generator=torch.Generator().manual_seed(2))
    cache = PagedCache(model.config, 2, 80, **SIZES)

    def check(tokens: Tensor, new: int) -> None:
        with torch.no_grad():
            out = model(tokens[:, -new:], past_key_values=cache, logits_to_keep=1).logits
            torch.testing.assert_close(out, eager(tokens, logits_to_keep=1).logits, atol=1e-4, rtol=1e-4)

    check(ids[:, :40], 40)
    cache.crop(-4)
    check(torch.cat([ids[:, :36], ids[:, 50:52]], 1), 2)
    with pytest.raises(ArgumentError, match=r"sliding_step"):
        cache.crop(-12)
    assert int(cache.get_seq_length()) == 38
    cache.crop(-2)
    check(ids[:, :44], 8)
    cache.crop(-44)
    check(ids[:, :7], 7)


def test_tokens_taken_back_one_by_one_are_as_many_as_at_once() -> None:
    """What was written over ahead of the first of them is lost to the later ones, too."""
    model, taken = paged("Mistral"), []
    for count in (1, 2, 3, 4):
        cache = PagedCache(model.config, 1, 64, **SIZES)
        with torch.no_grad():
            model(torch.randint(3, 99, (1, 40)), past_key_values=cache)
        with pytest.raises(ArgumentError, match="sliding_step"):
            for _ in range(40 // count):
                cache.crop(-count)
        taken.append(40 - int(cache.get_seq_length()))
    assert all(0 <= taken[0] - of_several < count for count, of_several in enumerate(taken, 1)), taken


def test_an_assistant_and_prompt_lookup() -> None:
    prompt = {"input_ids": torch.randint(3, 99, (1, 30), generator=torch.Generator().manual_seed(5))}
    call = {**prompt, "max_new_tokens": 24, "do_sample": False}
    want = tiny("Mistral").generate(**call)
    model = paged("Mistral")
    for options in ({"assistant_model": tiny("Llama", num_hidden_layers=1)}, {"prompt_lookup_num_tokens": 4}):
        cache = PagedCache(model.config, 1, 64, block_size=4, sliding_step=8)
        assert torch.equal(model.generate(**call, **options, past_key_values=cache), want), options
        assert all(rolling(cache))


def test_what_rings_cannot_hold_is_refused() -> None:
    model = paged("Mistral")
    cache = PagedCache(model.config, 1, 64, **SIZES)
    with torch.no_grad():
        model(torch.randint(3, 99, (1, 30)), past_key_values=cache)
        model.config.sliding_window = 20  # which its layers read at every call
        with pytest.raises(UnsupportedModelError, match="with a window of 20.*sliding_step=max_seq_len"):
            model(torch.ones(1, 1, dtype=torch.int64), past_key_values=cache)
    with pytest.raises(ArgumentError, match="sliding_step"):
        PagedCache(model.config, 1, 64, sliding_step=0)


def test_keys_that_other_layers_read_stay() -> None:
    """Gemma3n's last layers attend with the keys of the last sliding and the last full layer before them."""
    sliding, full = "sliding_attention", "full_attention"
    config = transformers.Gemma3nTextConfig(
        **{**COMMON, "hidden_size": 32, "intermediate_size": [48] * 5, "num_hidden_layers": 5},
        vocab_size_per_layer_input=99,
        head_dim=8,
        sliding_window=8,
        layer_types=[sliding, sliding, full, sliding, full],
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0] * 5,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        altup_num_inputs=2,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3nForCausalLM(config).eval()
    call = {**padded_prompts(length=30), "max_new_tokens": 12, "do_sample": False}
    model.set_attn_implementation("eager")
    want = model.generate(**call)
    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, 2, 64, **SIZES)
    assert torch.equal(model.generate(**call, past_key_values=cache, disable_compile=True), want)
    assert rolling(cache) == [True, False, False]


def test_a_forward_that_broke_off_is_not_continued() -> None:
    model = paged("Mistral")
    cache, ids = PagedCache(model.config, 1, 64, **SIZES), torch.randint(3, 99, (1, 30))
    states = torch.randn(1, 2, 30, 16)
    cache.update(states, states, 0)  # longer than a ring takes: attention would have written it
    with pytest.raises(ArgumentError, match="reset"):
        cache.update(states[:, :, :1], states[:, :, :1], 0)
    cache.reset()
    with torch.no_grad():
        out = model(ids, past_key_values=cache).logits
        torch.testing.assert_close(out, tiny("Mistral")(ids).logits, atol=1e-4, rtol=1e-4)
