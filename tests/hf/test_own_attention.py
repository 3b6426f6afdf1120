"""Models that ignore the attention interface, with functions of ours in their modules: right, in every form
of their configs that paged attention expresses, and refused in the others."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from model_coverage import checks, examine
from model_coverage.architectures import OPTIONS, model_of, model_types
from models import padded_prompts
from torch._dynamo.exc import Unsupported
from transformers import DynamicCache, StaticCache
from transformers.models.bloom import modeling_bloom
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from torchpaged import UnsupportedModelError
from torchpaged.hf import PagedCache, PagedModel, attach, detach, families
from torchpaged.hf.models import decoders, own_attention
from torchpaged.hf.support import lacks_causal_mask

OWN_ATTENTION = {name for name, family in families.FAMILIES.items() if family.own_attention}
MAY_LACK_CAUSAL_MASK = {name for name, family in families.FAMILIES.items() if family.may_lack_causal_mask}


def with_options(monkeypatch: pytest.MonkeyPatch, name: str, **options: Any) -> None:
    monkeypatch.setitem(OPTIONS, name, {**OPTIONS.get(name, {}), **options})


@pytest.mark.parametrize("name", sorted(OWN_ATTENTION & set(model_types())))
def test_family(name: str) -> None:
    row = examine(name, compiled=False)
    assert (row.mode, row.reason) == ("paged", "")
    assert row.checks == dict.fromkeys(("attach", "generate", "window", "forward"), "right")


@pytest.mark.parametrize("name", sorted(MAY_LACK_CAUSAL_MASK))
def test_a_prompt_does_not_see_what_follows(name: str) -> None:
    """Also where transformers' own eager attention does, as in 5.17: it is said, and undone by `detach`."""
    model, ids = model_of(name, "eager"), torch.randint(3, 99, (1, 8))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        before, want = model(**inputs).logits, checks._masked(model, inputs)
        lacks = not torch.allclose(before, want, rtol=1e-4, atol=1e-4)
        assert lacks == lacks_causal_mask(model)
        said = (
            pytest.warns(UserWarning, match="makes no causal mask.*masked causally")
            if lacks
            else nullcontext()
        )
        with said:
            attach(model)
        for cache in (None, PagedCache(model.config, 1, 16), DynamicCache(config=model.config)):
            got = model(**inputs, past_key_values=cache, use_cache=cache is not None).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        detach(model)
        assert torch.equal(model(**inputs).logits, before)


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon, one key head": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "falcon, a key head each": (
        "falcon",
        {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4},
    ),
    "falcon, parallel": ("falcon", {"new_decoder_architecture": False, "parallel_attn": True, "bias": True}),
    "bloom, six heads": ("bloom", {"n_head": 6, "hidden_size": 48}),
    "mpt, six heads": ("mpt", {"n_heads": 6, "d_model": 48}),
    "mpt, clipped and scaled": ("mpt", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}}),
    "roformer, values too": ("roformer", {"rotary_value": True}),
}


@pytest.mark.parametrize("form", FORMS)
def test_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, options = FORMS[form]
    with_options(monkeypatch, name, **options)
    row = examine(name, compiled=False)
    assert (row.mode, row.reason) == ("paged", "")


WRONG: dict[str, tuple[str, Any, str, Any]] = {
    "slopes": ("bloom", own_attention, "alibi_slopes", lambda num_heads: [0.1] * num_heads),
    "no rotation": ("falcon", decoders, "_rotate", lambda states, cos, sin: states),
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_checks_notice(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, file, function, instead = WRONG[fault]
    monkeypatch.setattr(file, function, instead)
    row = examine(name, compiled=False)
    assert row.mode == "wrong"
    assert row.reason.startswith("wrong: off by")


def test_the_checks_notice_a_window_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    module = own_attention.in_attn(lambda module: 1.0)
    monkeypatch.setitem(families.ATTENTION, "GPTNeoSelfAttention", module)
    row = examine("gpt_neo", compiled=False)
    assert row.mode == "wrong"
    assert row.checks["window"].startswith("wrong")


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 16, 71])
def test_slopes_are_those_of_the_models(num_heads: int) -> None:
    """Also for numbers of heads that are no power of two, where bloom and mpt write them down differently."""
    got = torch.tensor(own_attention.alibi_slopes(num_heads))
    biases = modeling_bloom.build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)
    torch.testing.assert_close(got, biases[:, 0, 1], rtol=1e-6, atol=0)
    torch.testing.assert_close(got, -build_mpt_alibi_tensor(num_heads, 2)[:, 0, 0], rtol=1e-6, atol=0)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "rounded biases": ("falcon", {"alibi": True}, "falcon with alibi=True.*rounds"),
    "random blocks": (
        "big_bird",
        {"attention_type": "block_sparse"},
        "attention_type='block_sparse'.*original_full",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, options, message = REFUSED[case]
    with_options(monkeypatch, name, **options)
    model = model_of(name, "eager")
    with pytest.raises(UnsupportedModelError, match=message):
        attach(model)
    with pytest.raises(UnsupportedModelError, match=message):
        PagedCache(model.config, 2, 32)


@pytest.mark.parametrize("name", ["gpt_neo", "bloom"])
def test_a_model_that_was_not_attached_says_so(name: str) -> None:
    """With a cache that was not used, and with one that served an attached model."""
    model, prompt = model_of(name, "torchpaged"), padded_prompts(padding=0)
    used = PagedCache(model.config, 2, 32)
    checks._generate(attach(model_of(name)), prompt, used)
    used.reset()
    for cache in (PagedCache(model.config, 2, 32), used):
        with pytest.raises(UnsupportedModelError, match=rf"{name} ignores.*torchpaged.hf.attach\(model\)"):
            checks._generate(model, prompt, cache)


@pytest.mark.parametrize("name", ["gpt_neo", "bloom", "gpt_neox_japanese"])
def test_a_static_cache_runs_as_before(name: str) -> None:
    """In an attached model, another cache than ours gets what the modules did before."""
    model, inputs = model_of(name, "eager"), padded_prompts()
    if name == "bloom" and not hasattr(model, "create_masks_for_generate"):
        pytest.skip("bloom of transformers 5.17 does not run with a StaticCache")
    want, _ = checks._generate(model, inputs, StaticCache(model.config, 32))
    attach(model)
    got, _ = checks._generate(model, inputs, StaticCache(model.config, 32))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_packed_tokens_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM ignores.*not as packed tokens"):
        PagedModel(model_of("bloom", "eager"), num_blocks=4)


@pytest.mark.parametrize("attached", [False, True])
def test_a_first_forward_that_is_compiled(attached: bool) -> None:
    """With as many heads as a block has tokens, a model that was not attached could multiply with the
    pools."""
    torch._dynamo.reset()
    model = model_of("gpt_neox_japanese", "torchpaged")
    if attached:
        attach(model)
    cache = PagedCache(model.config, 1, 32, block_size=4)
    cache.early_initialization(1, 4, 16, torch.float32, torch.device("cpu"))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = torch.randint(3, 99, (1, 1))
    with (
        torch.no_grad(),
        pytest.raises(Unsupported, match="gpt_neox_japanese: the first forward of its cache was compiled"),
    ):
        compiled(ids, position_ids=torch.zeros_like(ids), past_key_values=cache)


WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "a prompt in chunks": {"prefill_chunk_size": 6},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["bloom", "falcon", "gpt_neo", "mpt", "trocr"])
def test_other_ways_to_generate(name: str, way: str) -> None:
    """Left-padded, where more than one row may be; rows that copy blocks, and tokens that are taken back."""
    model, inputs = model_of(name, "eager"), padded_prompts()
    if way == "prompt lookup":
        inputs = {key: value[1:] for key, value in inputs.items()}
    greedy: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    call = {**inputs, **greedy, **WAYS[way]}
    want = model.generate(**{key: value for key, value in call.items() if key != "prefill_chunk_size"})
    attach(model)
    cache = PagedCache.for_inputs(model, **call, block_size=4)
    assert torch.equal(model.generate(**call, past_key_values=cache), want)
