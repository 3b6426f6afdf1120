"""What would be silently wrong is refused, by name and before anything is written; what is not paged works
as before."""

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of
from models import MODELS, padded_prompts, paged, tiny
from transformers import CpmAntConfig, CpmAntForCausalLM, DynamicCache

from torchpaged import ArgumentError, BlockPoolExhaustedError, UnsupportedModelError
from torchpaged.hf import PagedCache, PagedModel, attach, fuse
from torchpaged.hf.cache_argument import CACHE
from torchpaged.hf.support import require_supported


def test_a_model_that_ignores_the_interface() -> None:
    config = CpmAntConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = CpmAntForCausalLM(config)
    with pytest.raises(UnsupportedModelError, match="CpmAntForCausalLM.*attention interface"):
        require_supported(model)
    with pytest.raises(UnsupportedModelError, match="CpmAntForCausalLM"):
        PagedModel(model, num_blocks=4)
    with pytest.raises(UnsupportedModelError, match="CpmAntForCausalLM"):
        PagedCache(model.config, 1, 16)
    require_supported(tiny("Llama"))


MASKS = {
    "right_padding": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
    "hole": torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1]]),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_that_paging_cannot_express(mask: str) -> None:
    model = paged()
    cache = PagedCache(model.config, 2, 32)
    with pytest.raises(ArgumentError, match="left padding only"), torch.no_grad():
        model(torch.randint(3, 99, (2, 4)), attention_mask=MASKS[mask], past_key_values=cache)
    assert not cache.ready


@pytest.mark.parametrize("through", ["forward", "generate"])
@pytest.mark.parametrize("fused", [False, True])
def test_weights_of_attention(through: str, fused: bool) -> None:
    """transformers would give empty tuples. Nothing is written before, from its 5.24 on."""
    model, inputs = paged(), padded_prompts()
    if fused:
        fuse(model, count=False)
    cache, asks = PagedCache(model.config, 2, 64), {"output_attentions": True}
    with torch.no_grad():
        call: Any = model if through == "forward" else model.generate
        with pytest.raises(ArgumentError, match="output_attentions: expected False.*keeps no weights"):
            call(**inputs, past_key_values=cache, **asks)
        if CACHE == "past_key_values":  # older transformers tell the cache nothing: behind the first write
            cache.reset()
        model(**inputs, past_key_values=cache)


def test_weights_of_attention_without_a_cache() -> None:
    model, inputs = paged(), padded_prompts()
    for use_cache in (False, True):
        with torch.no_grad(), pytest.raises(ArgumentError, match="output_attentions: expected False"):
            model(**inputs, use_cache=use_cache, output_attentions=True)


def test_rows_padded_again_later() -> None:
    model = paged()
    cache = PagedCache(model.config, 2, 32)
    with torch.no_grad():
        model(torch.randint(3, 99, (2, 4)), attention_mask=torch.ones(2, 4), past_key_values=cache)
        mask = torch.ones(2, 7)
        mask[0, :3] = 0
        with pytest.raises(ArgumentError, match="left padding of this cache's first batch"):
            model(torch.randint(3, 99, (2, 3)), attention_mask=mask, past_key_values=cache)
    assert int(cache.get_seq_length()) == 4


def test_four_dimensional_masks() -> None:
    """Refused by paged and by gathered keys, and both name the cache that takes them."""
    model, ids = tiny("Llama"), torch.randint(3, 99, (1, 9))
    mask = torch.zeros(1, 1, 9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -float("inf"))
    mask[..., 6:, 2:4] = -float("inf")
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        model.set_attn_implementation("torchpaged")
        for dense, error in ((False, ArgumentError), (True, UnsupportedModelError)):
            cache = PagedCache(model.config, 1, 32, dense=dense)
            with pytest.raises(error, match=r"mask.*DynamicCache\(config=model.config\)"):
                model(ids, attention_mask=mask, past_key_values=cache)
        model(ids, past_key_values=cache)  # the one of gathered keys, whose masks are longer than the text
        with pytest.raises(ArgumentError, match=r"over the 32 keys.*DynamicCache\(config=model.config\)"):
            model(ids[:, :3], attention_mask=torch.ones(1, 1, 3, 12).bool(), past_key_values=cache)
        got = model(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config)).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_more_tokens_than_max_seq_len(compiled: bool) -> None:
    from transformers import CompileConfig

    torch._dynamo.reset()
    model, inputs = paged(), padded_prompts()
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    if compiled:
        options["compile_config"] = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
        options["compile_config"]._compile_all_devices = True
    with pytest.raises((ArgumentError, RuntimeError), match="max_seq_len"):
        model.generate(**inputs, **options, past_key_values=PagedCache(model.config, 2, 24))
    cache = PagedCache(model.config, 2, 16)
    with pytest.raises(ArgumentError, match="room for 20 tokens"):
        model.generate(**inputs, **options, past_key_values=cache)
    assert not cache.ready
    # the last token is never written
    model.generate(**inputs, **options, past_key_values=PagedCache(model.config, 2, 29))


def test_rows_and_blocks() -> None:
    model, inputs = paged(), padded_prompts()
    with pytest.raises(ArgumentError, match="max_batch_size: expected at least the batch"):
        model.generate(**inputs, max_new_tokens=2, past_key_values=PagedCache(model.config, 1, 32))
    with pytest.raises(BlockPoolExhaustedError):
        model.generate(
            **inputs, max_new_tokens=2, past_key_values=PagedCache(model.config, 2, 32, num_blocks=3)
        )
    cache = PagedCache(model.config, 3, 32)
    with torch.no_grad():
        model(inputs["input_ids"], past_key_values=cache)
        with pytest.raises(ArgumentError, match="2 rows"):
            model(torch.randint(3, 99, (3, 1)), past_key_values=cache)


@pytest.mark.parametrize(("name", "argument"), [("llama", "key_states"), ("lfm2", "x")])
def test_a_model_of_another_dtype_behind_a_reset(name: str, argument: str) -> None:
    model, ids = attach(model_of(name)), torch.randint(3, 99, (2, 4))
    cache = PagedCache(model.config, 2, 32)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.reset()
        said = rf"{argument}: expected .*float32 on cpu, as this cache's layer 0 was made for, got .*bfloat16"
        with pytest.raises(ArgumentError, match=said):
            model.bfloat16()(ids, past_key_values=cache)


def test_an_attention_implementation_that_was_not_set() -> None:
    model = tiny("Llama")
    with pytest.raises(ArgumentError, match="set_attn_implementation"), torch.no_grad():
        model(torch.randint(3, 99, (1, 4)), past_key_values=PagedCache(model.config, 1, 32))


def test_grad_is_refused_and_training_without_a_cache_works() -> None:
    model = paged()
    ids = torch.randint(3, 99, (2, 6))
    with pytest.raises(ArgumentError, match="for inference"):
        model(ids, past_key_values=PagedCache(model.config, 2, 32))
    model.train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


def test_trained_sinks_are_refused() -> None:
    model = paged("GptOss").requires_grad_(False)
    model.model.layers[0].self_attn.sinks.requires_grad_()
    with pytest.raises(ArgumentError, match="sinks: expected a tensor without grad"):
        model(torch.randint(3, 99, (2, 6)), past_key_values=PagedCache(model.config, 2, 32))


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("dense", [False, True])
def test_one_trained_projection_is_refused(trained: str, dense: bool) -> None:
    """The pools would keep its states and drop their gradient; a compiled forward says it, too."""
    model = paged().requires_grad_(False)
    ids, cache = torch.randint(3, 99, (2, 6)), PagedCache(model.config, 2, 32, dense=dense)
    want = model(ids, past_key_values=cache).logits
    cache.reset()
    getattr(model.model.layers[0].self_attn, trained).requires_grad_()
    if trained != "q_proj" or not dense:  # dense keys are SDPA's, and so is the gradient of queries
        with pytest.raises(ArgumentError, match="expected a tensor without grad"):
            model(ids, past_key_values=cache)
        assert trained == "q_proj" or not cache.ready
        cache.reset()
    with torch.no_grad():
        assert torch.equal(model(ids, past_key_values=cache).logits, want)
    if not dense:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with pytest.raises(Exception, match="ArgumentError.*a tensor without grad"):
            compiled(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "GptOss", "bloom", "gptj", "bart", "bigbird_pegasus"])
def test_layers_that_checkpoint_gradients_lose_their_cache(name: str, grad: bool) -> None:
    """In training mode transformers takes the cache from each layer, and with it what the pools know of
    padding and windows. Without a cache such a model trains, also behind the refusal."""
    model, inputs = attach(tiny(name) if name in MODELS else model_of(name, "eager")), padded_prompts()
    cache = PagedCache(model.config, 2, 32)
    model.train().gradient_checkpointing_enable()
    said: Any = pytest.raises(ArgumentError, match="past_key_values: expected no PagedCache in training mode")
    if CACHE == "cache" and not grad:  # transformers 5.24 takes none then
        own = name == "bloom"
        said = pytest.raises(UnsupportedModelError, match="while it trains") if own else nullcontext()
    with said, torch.set_grad_enabled(grad):
        model(**inputs, past_key_values=cache)
    # Under torch 2.11 the hooks of the checkpoint that was left live as long as the error's traceback.
    del said
    gc.collect()
    model(**inputs, use_cache=False, labels=inputs["input_ids"]).loss.backward()
    with torch.no_grad():
        cache.reset()
        model.eval()(**inputs, past_key_values=cache)
    assert cache.ready


@pytest.mark.parametrize(("name", "argument"), [("Gemma2", "softcap"), ("GptOss", "s_aux")])
def test_dense_calls_that_sdpa_would_get_wrong(name: str, argument: str) -> None:
    """Without a cache they run on our kernels, with gradients by the formula; dropout of the weights in
    neither."""
    model, ids = tiny(name, attention_dropout=0.1), torch.randint(3, 99, (1, 12))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    wanted = gradients(model, input_ids=ids)
    model.set_attn_implementation("torchpaged")
    with torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=False).logits, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients(model, input_ids=ids), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedModelError, match=argument):
        model.train()(ids, use_cache=False)


def gradients(model: Any, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.slow_cases("Gemma2-True", "vaultgemma-True")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["Gemma2", "GptOss", "vaultgemma"])
def test_soft_caps_and_sinks_of_padded_prompts_without_a_paged_cache(name: str, compiled: bool) -> None:
    """At the tokens what eager attention gives: without a cache, and in pieces on transformers' own."""
    model, inputs = tiny(name) if name in MODELS else model_of(name, "eager"), padded_prompts()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def run(compiled: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        call = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            got = [call(**inputs, use_cache=False).logits[mask.bool()]]
            for start, end in ((0, 16), (16, 17), (17, 20)):
                piece = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
                logits = model(**piece, past_key_values=cache).logits
                got.append(logits[mask[:, start:end].bool()])
        return got

    want = run(compiled=False)
    tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    model.set_attn_implementation("torchpaged")
    torch.testing.assert_close(run(compiled), want, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False), tokens)
    dense = PagedCache(model.config, 2, 32, dense=True)
    got = model.generate(**inputs, past_key_values=dense, max_new_tokens=6, do_sample=False)
    assert torch.equal(got, tokens)


def test_two_caches_and_an_exception_in_between() -> None:
    """No state outside the caches: interleaved models, a failed forward and a dense one do not disturb
    each other."""
    one, two, ids = paged("Llama"), paged("Mistral"), torch.randint(3, 99, (1, 12))
    caches = [PagedCache(m.config, 1, 32, block_size=4) for m in (one, two)]
    with torch.no_grad():
        want = [m(ids, use_cache=False).logits for m in (one, two)]
        got: list[list[torch.Tensor]] = [[], []]
        for start in range(0, 12, 3):
            for i, (model, cache) in enumerate(zip((one, two), caches, strict=True)):
                got[i].append(model(ids[:, start : start + 3], past_key_values=cache).logits)
            with pytest.raises(ArgumentError):
                one(ids, past_key_values=PagedCache(one.config, 1, 4))
            torch.testing.assert_close(one(ids, use_cache=False).logits, want[0])
    for pieces, whole in zip(got, want, strict=True):
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)


def test_pools_are_freed_with_their_cache() -> None:
    import weakref

    model = paged()
    cache = PagedCache(model.config, 1, 32)
    with torch.no_grad():
        model(torch.randint(3, 99, (1, 4)), past_key_values=cache)
    pool = weakref.ref(cache.paged[0].keys)
    del cache
    gc.collect()
    assert pool() is None


def test_describe() -> None:
    model = paged()
    cache = PagedCache(model.config, 1, 32)
    with torch.no_grad():
        model(torch.randint(3, 99, (1, 4)), past_key_values=cache)
    assert cache.describe().startswith("3 blocks of 16 tokens = 32 tokens in 3 paged layers")
    assert "768 bytes per token" in cache.describe()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_batch_size": "2"}, "max_batch_size: expected an int of at least 1, got '2'"),
        ({"max_batch_size": True}, "max_batch_size: expected an int"),
        ({"max_seq_len": 32.0}, "max_seq_len: expected an int of at least 1, got 32.0"),
        ({"max_seq_len": None}, "max_seq_len: expected an int"),
        ({"block_size": 3.5}, "block_size: expected an int"),
        ({"num_blocks": 2.5}, "num_blocks: expected None or an int of at least 2"),
        ({"num_blocks": 1}, "num_blocks: expected None or an int of at least 2"),
        ({"dense": "yes"}, "dense: expected True, False or None, got 'yes'"),
    ],
    ids=str,
)
def test_sizes_of_another_type(options: dict[str, Any], words: str) -> None:
    """By the names that the caller gave."""
    with pytest.raises(ArgumentError, match=f"^{words}"):
        PagedCache(tiny("Llama").config, **{"max_batch_size": 2, "max_seq_len": 32, **options})
