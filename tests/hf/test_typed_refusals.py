"""Models that a paged cache can't serve yet say so by a typed error; models with attention of their own get
the mask they add."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import build, logits_of
from model_coverage.architectures import model_of, model_types
from models import padded_prompts, tiny
from transformers import GenerationMixin

from torchpaged import ArgumentError, UnsupportedModelError
from torchpaged.fuse.rope_table import RopeTable
from torchpaged.hf import PagedCache, PagedModel
from torchpaged.hf.attention import paged_attention_forward
from torchpaged.hf.call_mask import MaskRequest

COMPUTING = ["DeepseekV2", "DeepseekV3", "MiniCPM3", "Youtu", "Glm4MoeLite", "DiffLlama", "Doge", "JetMoe"]


@pytest.mark.parametrize("stem", COMPUTING)
def test_models_that_compute_with_their_cache(stem: str) -> None:
    """Latent attention expands the cached keys, JetMoe repeats them, Doge makes a mask of the values."""
    model = build(stem, implementation="torchpaged")
    cache = PagedCache(model.config, 2, 32, block_size=4, dense=False)
    for _ in range(2):  # a second try is refused again
        with pytest.raises(
            UnsupportedModelError,
            match=r"computes with its cached keys or values \(\w+\).*PagedCache\(\.\.\., dense=True\)",
        ):
            logits_of(model, padded_prompts(), cache)
        cache.reset()


@pytest.mark.parametrize("stem", ["Mamba", "MiniMax"])
def test_models_whose_cache_is_of_another_kind(stem: str) -> None:
    model = build(stem)
    with pytest.raises(UnsupportedModelError, match=r"keeps states alone|cache of its own kind"):
        PagedCache(model.config, 2, 32)


def test_what_a_trace_can_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the padding of a compiled prompt, or make a table of rotations longer."""
    model = tiny("Llama")
    rotary, masks = model.get_decoder().rotary_emb, PagedCache(model.config, 1, 32).masks
    table = RopeTable(rotary, None, 16, False, 8)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(UnsupportedModelError, match="needs 9 positions, the table has 8"):
        table.ensure(9, torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="prefill with an attention mask was compiled"):
        masks.observe(MaskRequest(1, 5, 5, torch.ones(1, 5)))


def test_a_config_that_static_cache_can_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchpaged.hf import template

    def broken(**_: Any) -> None:
        raise KeyError("heavily_compressed_attention")

    monkeypatch.setattr(template, "StaticCache", broken)
    with pytest.raises(UnsupportedModelError, match="gpt_neox.*StaticCache.*heavily_compressed_attention"):
        PagedCache(build("GPTNeoX").config, 2, 32)


def test_sparse_selection_without_a_cache() -> None:
    """The indices that DeepSeek V3.2 hands to a foreign attention function, which SDPA drops, select; those
    of blocks are refused."""
    inputs = padded_prompts()
    with torch.no_grad():
        want, got = (
            build("DeepseekV32", implementation=name)(**inputs, use_cache=False).logits
            for name in ("eager", "torchpaged")
        )
    tokens = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[tokens], want[tokens], rtol=1e-4, atol=1e-4)
    q, blocks = torch.randn(1, 2, 4, 8), torch.zeros(1, 1, 4, 1, dtype=torch.int64)
    with pytest.raises(UnsupportedModelError, match="selects keys sparsely"):
        paged_attention_forward(torch.nn.Identity(), q, q, q, None, block_indices=blocks)


@pytest.mark.parametrize("stem", ["Bloom", "GPTNeoXJapanese", "XGLM", "TrOCR", "Mvp"])
def test_attention_of_its_own_gets_its_mask(stem: str) -> None:
    """Built with the implementation's name, which transformers accepts for any model, and used without
    a PagedCache."""
    inputs = padded_prompts()
    want, got = (logits_of(build(stem, implementation=name), inputs) for name in ("eager", "torchpaged"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
    model = build(stem, implementation="torchpaged")
    for padding in (0, 7):  # Bloom widens a mask that has zeros, before it ignores the interface
        with pytest.raises(
            (UnsupportedModelError, ArgumentError), match=r"call torchpaged.hf.attach\(model\)"
        ):
            logits_of(model, padded_prompts(padding=padding), PagedCache(model.config, 2, 32))


def test_attention_of_its_own_compiled() -> None:
    torch._dynamo.reset()
    model, inputs = build("Bloom", implementation="torchpaged", n_layer=1), padded_prompts()
    with torch.no_grad():
        want = build("Bloom", n_layer=1)(**inputs, use_cache=False).logits[:, -1]
        got = torch.compile(model, backend="eager", fullgraph=True)(**inputs, use_cache=False).logits[:, -1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_private_names_of_transformers() -> None:
    """What support.py asks of transformers beyond its public names."""
    assert GenerationMixin._supports_default_dynamic_cache.__func__(transformers.LlamaForCausalLM)
    assert not transformers.MiniMaxForCausalLM._supports_default_dynamic_cache()


COMPUTATIONS: dict[str, Callable[[Any], Any]] = {
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "slice": lambda x: x[:1],
    "matmul": lambda x: x @ x.mT,
    "cat": lambda x: torch.cat([x, x]),
    "chunk": lambda x: x.chunk(2, dim=1),
    "half": lambda x: x.double(),
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_pools_refuse_arithmetic(name: str) -> None:
    model = build("GPTNeoX", implementation="torchpaged")
    cache = PagedCache(model.config, 1, 8, block_size=4)
    key, value = cache.update(torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 8), 0)
    assert key.shape == value.shape == (3, 4, 4, 8)
    assert key.dtype == torch.float32
    assert key.contiguous() is key
    assert key.to("cpu") is key
    with pytest.raises(UnsupportedModelError, match="gpt_neox computes with"):
        COMPUTATIONS[name](key)


@pytest.mark.parametrize("attends", [False, True])
def test_pools_refuse_arithmetic_until_attention_took_them(attends: bool) -> None:
    """A model that was refused is refused again, after reset() too; one that attends pays for one
    forward only."""
    model = build("GPTNeoX", implementation="torchpaged")
    cache, states = PagedCache(model.config, 1, 8, block_size=4), torch.ones(1, 4, 2, 8)
    key, value = cache.update(states, states, 0)
    with torch.no_grad():
        if attends:
            paged_attention_forward(model, states, key, value, None)
        else:
            with pytest.raises(UnsupportedModelError, match="computes with"):
                key.repeat(1, 2, 1, 1)
        cache.reset()
        key, value = cache.update(states, states, 0)
    assert (key is cache.paged[0].keys) == (value is cache.paged[0].values) == attends


def test_keys_in_the_place_of_values() -> None:
    model = build("GPTNeoX", implementation="torchpaged")
    cache = PagedCache(model.config, 1, 8, block_size=4)
    key, _ = cache.update(torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 8), 0)
    with pytest.raises(UnsupportedModelError, match="other than its cached keys and values"):
        paged_attention_forward(model, torch.ones(1, 4, 2, 8), key, key, None)


@pytest.mark.parametrize("name", ["dory", "inkling2_loop_text"])
def test_models_that_add_layers_to_their_cache(name: str) -> None:
    """A layer per pass through a loop: refused by the cache and by the engine, before either is made."""
    if name not in model_types():
        pytest.skip(f"not in transformers {transformers.__version__}")
    model = model_of(name, "torchpaged")
    for make in (lambda: PagedCache(model.config, 2, 32), lambda: PagedModel(model, num_blocks=4)):
        with pytest.raises(UnsupportedModelError, match=rf"{name} cannot run .* each pass through its loop"):
            make()
