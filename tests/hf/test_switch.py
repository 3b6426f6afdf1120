"""Switching a model to paged attention and back leaves nothing behind, whatever the model and however it
ends."""

import copy
import functools
import io
from typing import Any

import pytest
import torch
from families import build
from model_coverage.architectures import model_of
from models import padded_prompts, tiny
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from torchpaged import ArgumentError, NotCopyableError, UnsupportedModelError
from torchpaged.hf import PagedCache, attach, attached, detach, paged

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def everything_of(model: PreTrainedModel) -> list[tuple[int, list[str], Any]]:
    """What could have been left on a module: its own attributes, and its config's implementation."""
    parts = [(id(m), sorted(vars(m)), getattr(m, "config", None)) for m in model.modules()]
    return [(i, names, getattr(config, "_attn_implementation", None)) for i, names, config in parts]


@pytest.mark.parametrize("name", ["llama", "gptj", "bloom", "trocr"])
def test_there_and_back(name: str) -> None:
    model, inputs = model_of(name, "eager"), padded_prompts()
    before, want = everything_of(model), model.generate(**inputs, **GREEDY)
    for _ in range(2):
        with paged(model) as same:
            assert same is model
            assert model.config._attn_implementation == "torchpaged"
            cache = PagedCache(model.config, 2, 32, block_size=4)
            assert torch.equal(model.generate(**inputs, **GREEDY, past_key_values=cache), want)
            assert torch.equal(model.generate(**inputs, **GREEDY), want)  # with a cache of transformers' own
        assert everything_of(model) == before
    assert torch.equal(model.generate(**inputs, **GREEDY), want)


def test_an_exception_restores_too() -> None:
    model = model_of("gptj", "eager")
    before = everything_of(model)
    with pytest.raises(ZeroDivisionError), paged(model):
        raise ZeroDivisionError
    assert everything_of(model) == before


def test_the_parts_of_a_model_keep_implementations_of_their_own() -> None:
    text = {"model_type": "llama", "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48}
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "image_size": 8}
    few = {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(text_config={**text, **few}, vision_config={**vision, **few, "patch_size": 4})
    model = LlavaForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    model.set_attn_implementation({"text_config": "eager"})
    before = everything_of(model)
    with paged(model):
        assert model.config.text_config._attn_implementation == "torchpaged"
    assert everything_of(model) == before
    assert model.config.text_config._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_attached_once() -> None:
    model = tiny("Llama")
    with pytest.raises(ArgumentError, match=r"model: expected a model that attach\(\) was called on"):
        detach(model)
    assert attach(model) is model
    with pytest.raises(ArgumentError, match=r"call torchpaged.hf.detach\(model\) first"):
        attach(model)
    detach(model)
    assert model.config._attn_implementation == "eager"


def test_a_refused_model_is_left_as_it_was() -> None:
    model = model_of("cpmant", "eager")
    before = everything_of(model)
    with pytest.raises(UnsupportedModelError, match="CpmAntForCausalLM.*attention interface"):
        attach(model)
    assert everything_of(model) == before


@pytest.mark.parametrize("name", ["bloom", "dbrx"])
def test_a_model_is_left_as_it_was_by_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever looks at its modules, halfway."""

    def put_in(functions: Any) -> None:
        attached_put_in(functions)
        raise KeyboardInterrupt

    attached_put_in = attached.put_in
    model = model_of(name, "eager")
    before = everything_of(model)
    with monkeypatch.context() as patch:
        patch.setattr(attached, "put_in", put_in)
        with pytest.raises(KeyboardInterrupt):
            attach(model)
    assert everything_of(model) == before
    with paged(model):
        assert everything_of(model) != before
    assert everything_of(model) == before


def test_stacks_with_a_copy_of_the_config() -> None:
    """T5's stacks have a copy each, which transformers 5.17 passes by."""
    model = build("T5", "ForConditionalGeneration")
    configs = [model.config, model.encoder.config, model.decoder.config]
    with paged(model):
        assert [config._attn_implementation for config in configs] == ["torchpaged"] * 3
    assert [config._attn_implementation for config in configs] == ["eager"] * 3


@pytest.mark.parametrize("name", ["bloom", "dbrx", "ctrl"])
def test_a_copy_runs_its_own_weights(name: str) -> None:
    """The functions that `attach` put in run what stood there before: of the copy, not of its original."""
    model = model_of(name, "eager")
    kinds = ("BloomAttention", "DbrxExperts", "CTRLModel")
    hooked = next(module for module in model.modules() if type(module).__name__ in kinds)
    hooked.forward = functools.partial(type(hooked).forward, hooked)  # as accelerate's hooks
    hooked._hf_hook = "of accelerate"
    ids = padded_prompts()["input_ids"][1:]
    attach(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.mul_(1.5)
        fresh = model_of(name, "eager")
        fresh.load_state_dict(twin.state_dict())
        want, before = fresh(ids).logits, model(ids).logits
        got = [twin(ids).logits, twin(ids, past_key_values=PagedCache(twin.config, 1, 32)).logits]
        detach(twin)
        got.append(twin(ids).logits)
        assert (want - before).abs().max() > 0.01
        for logits in got:
            torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
        detach(model)
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("of_class", [True, False])
@pytest.mark.parametrize(("name", "kind"), [("mpt", "MptAttention"), ("falcon", "FalconAttention")])
def test_a_forward_of_others_is_not_passed_by(
    name: str, kind: str, of_class: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attached, these modules run a forward of ours in the place of theirs."""
    model = model_of(name, "eager")
    module = next(module for module in model.modules() if type(module).__name__ == kind)
    plain = type(module).forward
    if of_class:
        monkeypatch.setattr(
            type(module), "forward", lambda self, *args, **options: plain(self, *args, **options)
        )
    else:
        module.forward = functools.partial(plain, module)
    with pytest.raises(UnsupportedModelError, match=f"a {kind} has a forward that another one replaced"):
        attach(model)
    assert model.config._attn_implementation == "eager"
    assert not any(hasattr(part, "_torchpaged_own_attention") for part in model.modules())


def test_a_pickle_of_functions_is_refused() -> None:
    """It would look them up by name, and find the class's, which take pools for keys."""
    model = model_of("gpt_neo", "eager")
    attach(model)
    with pytest.raises(NotCopyableError, match=r"detach\(model\)"):
        torch.save(model, io.BytesIO())
    detach(model)
    torch.save(model, io.BytesIO())


@pytest.mark.parametrize("name", ["llama", "gptj"])
@pytest.mark.parametrize("first", [0, 1])
def test_models_that_share_a_config(name: str, first: int) -> None:
    """In whatever order they are detached: who is attached stays so, and nothing is left behind."""
    model = model_of(name, "eager")
    pair = [model, type(model)(model.config).eval()]
    ids = padded_prompts()["input_ids"]
    for each in pair:
        attach(each)
    last = pair[1 - first]
    detach(pair[first])
    with torch.no_grad():
        got = last(ids, past_key_values=PagedCache(last.config, 2, 32)).logits
        detach(last)
        assert model.config._attn_implementation == "eager"
        torch.testing.assert_close(got, last(ids).logits, rtol=1e-4, atol=1e-4)


def test_parts_and_wholes_are_not_attached_both() -> None:
    """A module has one function of ours at most, and detaching the other would take it out, or leave it."""
    model = model_of("bloom", "eager")
    before = everything_of(model)
    for first, second in ((model, model.transformer), (model.transformer, model)):
        attach(first)
        with pytest.raises(ArgumentError, match="no part of which is attached"):
            attach(second)
        detach(first)
        assert everything_of(model) == before


def test_training_mode_is_named() -> None:
    """Attached, a model that trains runs its own attention, which has no use for pools."""
    model = model_of("bloom", "eager")
    with paged(model), torch.no_grad(), pytest.raises(UnsupportedModelError, match="while it trains"):
        model.train()(**padded_prompts(), past_key_values=PagedCache(model.config, 2, 32))


@pytest.mark.parametrize("name", ["bloom", "mpt", "gpt_neo"])
def test_models_with_attention_of_their_own_are_told_to_attach(name: str) -> None:
    """By the two lines of other models, padded: before the model reads a mask that it can't."""
    model = model_of(name, "eager").eval()
    model.set_attn_implementation("torchpaged")
    options = {"past_key_values": PagedCache(model.config, 2, 64), "use_cache": True, "max_new_tokens": 2}
    with pytest.raises(ArgumentError, match=r"attn_implementation: .*; call torchpaged.hf.attach\(model\)"):
        model.generate(**padded_prompts(), **options)


def engine(model: Any) -> Any:
    from torchpaged.engine import Generator

    return Generator(model, max_batch_size=1, max_seq_len=32, graphs=False)


@pytest.mark.parametrize("detached_between", [False, True])
def test_engines_over_an_attached_model(detached_between: bool) -> None:
    """Whatever was before `attach` is there again once it and they have ended."""
    model = attach(model_of("llama", "eager"))
    first = engine(model)
    if detached_between:
        detach(model)
        second = engine(model)
        first.close()
        second.close()
    else:
        first.close()
        detach(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("first", [0, 1])
def test_engines_over_models_that_share_a_config(first: int) -> None:
    """The one that is left goes on; the config has what was before both, once both are closed."""
    model = model_of("llama", "eager")
    engines = [engine(each) for each in (model, type(model)(model.config).eval())]
    engines[first].close()
    assert engines[1 - first].generate([[5, 6, 7]])[0].token_ids
    engines[1 - first].close()
    assert model.config._attn_implementation == "eager"


def test_a_forward_of_someone_else_stays_when_an_engine_closes() -> None:
    model = model_of("dbrx", "eager")
    experts = next(module for module in model.modules() if type(module).__name__ == "DbrxExperts")
    generator = engine(model)
    given = experts.forward
    experts.forward = own = lambda *args, **options: given(*args, **options)
    generator.close()
    assert experts.forward is own
