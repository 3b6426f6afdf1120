"""Forwards that the user compiled: set-up happens in a graph break or is refused with its reason, and shared
pools stay known in a trace."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import build
from models import padded_prompts, tiny
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import Cache, CompileConfig, PreTrainedModel

from torchpaged.hf import PagedCache

GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
#: Layers that share keys; Gemma 4's full ones have wider heads, too.
SHARED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def moves_shared_pools(model: PreTrainedModel) -> bool:
    """Whether layers take another one's pools through ``Tensor.to``, as in transformers 5.17."""
    return ".to(query_states.device)" in inspect.getsource(type(model.model.layers[0].self_attn).forward)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "Llama": lambda: tiny("Llama", num_hidden_layers=2),
    "Gemma3n": lambda: build("Gemma3n", **SHARED, activation_sparsity_pattern=[0.0] * 4),
    "Gemma4": lambda: build("Gemma4", **SHARED),
}


@pytest.mark.slow_cases("Gemma3n-True", "Llama-True")
@pytest.mark.parametrize(("name", "padded"), [("Llama", True), ("Llama", False), ("Gemma3n", True)])
def test_generate_with_a_compiled_forward_and_a_fresh_cache(name: str, padded: bool) -> None:
    """``model.forward = torch.compile(model.forward)``: prefill and set-up are inside, as a graph break."""
    torch._dynamo.reset()
    model, inputs, options = MODELS[name](), padded_prompts(), {**GREEDY, "max_new_tokens": 2}
    if not padded:
        del inputs["attention_mask"]
    model.set_attn_implementation("eager")
    want = model.generate(**inputs, **options)
    model.set_attn_implementation("torchpaged")
    model.forward = torch.compile(model.forward, backend="eager")
    cache = PagedCache(model.config, 2, 64, block_size=4)
    assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), want)
    cache.reset()  # rows get their blocks anew while the pools exist
    assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), want)


def test_a_padded_prompt_of_a_compiled_model() -> None:
    """Called without generate(), which has masks made ahead: code of ours that makes the mask is compiled by
    itself, behind a graph break."""
    torch._dynamo.reset()
    model, inputs = tiny("Llama", num_hidden_layers=1), padded_prompts()
    tokens = inputs["attention_mask"].bool()
    with torch.no_grad():
        want = model(**inputs).logits[tokens]
        model.set_attn_implementation("torchpaged")
        cache = PagedCache(model.config, 2, 64, block_size=4)
        got = torch.compile(model, backend="eager")(**inputs, past_key_values=cache).logits[tokens]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow_cases("Gemma3")
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_chunks_of_a_padded_prompt_compiled(name: str) -> None:
    """As generate() does it on a GPU: the mask that carries the padding enters compiled code."""
    torch._dynamo.reset()
    model, inputs = tiny(name, num_hidden_layers=1 if name == "Llama" else 2), padded_prompts()
    want = model.generate(**inputs, **GREEDY)
    model.set_attn_implementation("torchpaged")
    options = CompileConfig(backend="eager", mode=None)
    options._compile_all_devices = True
    cache = PagedCache(model.config, 2, 64, block_size=4)
    for _ in range(2):
        got = model.generate(
            **inputs, **GREEDY, prefill_chunk_size=4, compile_config=options, past_key_values=cache
        )
        assert torch.equal(got, want)
        cache.reset()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("tokens", "kept"), [(2, 1), (16, 8), (21, 10), (21, 20)])
def test_queries_that_give_no_logits_are_left_out(tokens: int, kept: int, compiled: bool) -> None:
    """Gemma 4 does so in layers that share keys, for generate() and for assisted generation's candidates:
    fewer queries than the forward has, in a first forward and behind another."""
    torch._dynamo.reset()
    model, ids = MODELS["Gemma4"](), torch.randint(3, 99, (2, 2 * tokens))
    cache = PagedCache(model.config, 2, 64, block_size=4, dense=compiled and moves_shared_pools(model))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(ids, use_cache=False).logits
        model.set_attn_implementation("torchpaged")
        behind = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
        for forward, new in ((model, torch.arange(tokens)), (behind, torch.arange(tokens, 2 * tokens))):
            places = new.expand(2, -1)
            out = forward(ids[:, new], position_ids=places, past_key_values=cache, logits_to_keep=kept)
            torch.testing.assert_close(out.logits, want[:, new[-kept:]], rtol=1e-4, atol=1e-4)


def decode_compiled(name: str, dense: bool = False) -> int:
    """Three compiled decode steps equal eager attention; how many graphs they took."""
    torch._dynamo.reset()
    model, ids = MODELS[name](), torch.randint(3, 99, (2, 12))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(ids, use_cache=False).logits
        model.set_attn_implementation("torchpaged")
        cache, counter = (
            PagedCache(model.config, 2, 32, block_size=4, dense=dense),
            CompileCounterWithBackend("aot_eager"),
        )
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        model(ids[:, :9], past_key_values=cache)
        for position in range(9, 12):
            step = {
                "input_ids": ids[:, position : position + 1],
                "position_ids": torch.full((2, 1), position),
            }
            got = compiled(**step, past_key_values=cache).logits
            torch.testing.assert_close(got, want[:, position : position + 1], rtol=1e-4, atol=1e-4)
    return counter.frame_count


@pytest.mark.slow_cases("Gemma3n", "Gemma4")
@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_is_one_graph(name: str) -> None:
    """Layers that share another one's pools know them in a trace, unless the model moves them to its device
    first, as in transformers 5.17."""
    if not moves_shared_pools(MODELS[name]()):
        assert decode_compiled(name) == 1
        return
    with pytest.raises(Unsupported, match=r"shares .* Tensor\.to.*dense=True"):
        decode_compiled(name)
    assert decode_compiled(name, dense=True) == 1


def test_a_first_forward_in_one_graph_says_what_to_do() -> None:
    """And with pools made ahead it runs."""
    torch._dynamo.reset()
    model, ids = tiny("Llama", num_hidden_layers=2), torch.randint(3, 99, (1, 5))
    model.set_attn_implementation("torchpaged")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = PagedCache(model.config, 1, 32)
    positions = torch.arange(5)[None]
    with torch.no_grad():
        with pytest.raises(
            RuntimeError,
            match=r"can't be made inside compiled code; run the first forward eagerly.*early_initialization",
        ):
            compiled(ids, position_ids=positions, past_key_values=cache)
        cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
        got = compiled(ids, position_ids=positions, past_key_values=cache).logits
        torch.testing.assert_close(got, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_that_is_compiled_by_itself(layer: int) -> None:
    """And no more in the last forward. So is a part of a model behind dynamo's limit of recompiles: compiled
    code begins forwards that others complete, or completes those of others."""
    torch._dynamo.reset()
    model, ids = tiny("Llama"), torch.randint(3, 99, (2, 14))
    cache = PagedCache(model.config, 2, 32, block_size=4)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        model.set_attn_implementation("torchpaged")
        compiled, plain = copy.copy(model.model.layers[layer]), model.model.layers[layer]
        compiled.compile(backend="eager")
        for lengths in ((7, 1, 1, 5), (9, 5)):
            got = []
            for i, part in enumerate(ids.split(lengths, 1)):
                model.model.layers[layer] = plain if i == 3 else compiled
                got.append(model(part, past_key_values=cache).logits)
            torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-4)
            cache.reset()


@pytest.mark.parametrize("layers", [True, False], ids=["compileable", "not"])
def test_whether_a_step_may_be_compiled_is_asked_of_the_layers(
    layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own rule, written out in the cache: torch 2.11 traces no property through ``super()``."""
    cache = PagedCache(tiny("Llama").config, 2, 32)
    monkeypatch.setattr(type(cache.layers[-1]), "is_compileable", layers)
    assert cache.is_compileable is layers
    assert Cache.is_compileable.fget(cache) is layers
    assert "super" not in type(cache).is_compileable.fget.__code__.co_names
