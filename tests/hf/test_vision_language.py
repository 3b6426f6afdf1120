"""Vision-language models behind a `PagedCache`: pictures whose tokens see each other in both directions, what
else a call may bring, and what is refused. Whole families: test_coverage.py and the committed tables."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from model_coverage.vision_language import examine, generate
from model_coverage.vision_models import batch_of, model_of, tokens_per_picture
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.masking_utils import blockwise_overlay, causal_mask_function, or_masks

from torchpaged import ArgumentError, BackendUnavailableError, UnsupportedModelError
from torchpaged.hf import PagedCache, accelerate, attach, attention, paged, unaccelerate
from torchpaged.hf.call_mask import CallMask, MaskRequest, held_by

ROWS = ("tit", "titit", "ttt")


def case(
    name: str, rows: tuple[str, ...] = ROWS, **options: Any
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    model = model_of(name)
    return model, batch_of(model, name, rows, tokens_per_picture(model, name), **options)


def cache_of(model: PreTrainedModel, **options: Any) -> PagedCache:
    return PagedCache(model.config, 4, **{"max_seq_len": 64, "block_size": 4, **options})


def same_logits(got: Any, want: Any) -> None:
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=0, atol=1e-4)


def test_without_spans_it_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attend_with_spans", lambda layer, call, marked: layer.attend(call))
    row = examine("gemma3", compiled=False)
    assert row.mode == "wrong"
    assert "off by" in row.checks["generate"]
    assert "off by" in row.checks["forward"]
    assert row.checks["uncached"] == "right"


@pytest.mark.parametrize(
    ("name", "options"), [("gemma3", {"dense": True}), ("gemma3", {"backend": "reference"}), ("llava", {})]
)
def test_other_caches(name: str, options: dict[str, Any]) -> None:
    model, call = case(name)
    want = generate(model, call)
    with paged(model):
        same_logits(generate(model, call, cache_of(model, **options)), want)


@pytest.mark.parametrize("dense", [False, True])
def test_a_cache_that_was_reset(dense: bool) -> None:
    """PaliGemma asks its cache whether a prompt begins, and makes a prefix that sees itself of it then; of
    masks that are made in the forward, as those of its second version are."""
    model, call = case("paligemma2")
    want = generate(model, call)
    with paged(model):
        cache = cache_of(model, dense=dense)
        for _ in range(2):
            cache.reset()
            assert not cache.is_initialized
            same_logits(generate(model, call, cache), want)
            assert cache.is_initialized


@pytest.mark.parametrize("name", ["gemma3", "idefics3"])
def test_beams(name: str) -> None:
    model, call = case(name, ("tit", "t"))
    options = {"max_new_tokens": 5, "num_beams": 2, "do_sample": False, "eos_token_id": None}
    want = model.generate(**call, **options)
    with paged(model):
        cache = PagedCache.for_inputs(model, **call, **options)
        assert torch.equal(model.generate(**call, **options, past_key_values=cache), want)


def test_layers_with_a_window_keep_every_token() -> None:
    """A picture is seen ahead of its tokens: rings would have lost, or not written yet, what it sees. A cache
    that was told of the text alone refuses pictures."""
    model, call = case("gemma3")
    want = generate(model, call)
    with paged(model):
        cache = cache_of(model, sliding_step=2)
        same_logits(generate(model, call, cache), want)
        assert any(layer.window for layer in cache.paged)
        assert not any(layer.rolls for layer in cache.paged)
        text = PagedCache(model.config.get_text_config(), 4, 64, block_size=2, sliding_step=2)
        with pytest.raises(UnsupportedModelError, match="ahead of its tokens.*sliding_step=max_seq_len"):
            generate(model, call, text)


def test_one_cache_for_several_batches() -> None:
    """Spans of an earlier prompt do not stay; text behind pictures goes on in the same cache."""
    model, call = case("gemma3")
    text = {name: call[name] for name in ("input_ids", "attention_mask")}
    text["input_ids"] = text["input_ids"] % 99
    wants = [generate(model, call), generate(model, text)]
    with paged(model):
        cache = cache_of(model)
        for given, want in zip((call, text, call), (wants[0], wants[1], wants[0]), strict=True):
            same_logits(generate(model, given, cache), want)
            cache.reset()
    told = {"input_ids": torch.cat([wants[0].sequences % 99, text["input_ids"]], 1)}
    ones = torch.ones(3, told["input_ids"].shape[1] - call["attention_mask"].shape[1], dtype=torch.int64)
    told["attention_mask"] = torch.cat([call["attention_mask"], ones], 1)
    want = generate(model, told, wants[0].past_key_values)
    with paged(model):
        cache = cache_of(model)
        generate(model, call, cache)
        same_logits(generate(model, told, cache), want)


@pytest.mark.parametrize("more", [-19, 0, 1, 2, 30])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["qwen3_vl", "glm4v"])
def test_text_behind_pictures(name: str, padded: bool, more: int) -> None:
    """Attention is told no positions of it, and always use_cache=False, its layer's default; so many tokens
    ``more`` than are cached."""
    model, call = case(name, ("titit", "tit"))
    if not padded:
        del call["attention_mask"]
    first = generate(model, call)
    length = first.sequences.shape[1]
    text = {"input_ids": torch.cat([first.sequences % 99, torch.randint(3, 90, (2, length + more - 2))], 1)}
    ahead = text["input_ids"].shape[1] - call["input_ids"].shape[1]
    text["mm_token_type_ids"] = F.pad(call["mm_token_type_ids"], (0, ahead))
    if padded:
        text["attention_mask"] = F.pad(call["attention_mask"], (0, ahead), value=1)
    want = generate(model, text, first.past_key_values)
    with paged(model):
        cache = cache_of(model, max_seq_len=128)
        generate(model, call, cache)
        same_logits(generate(model, text, cache), want)
        cache.reset()
        with pytest.raises(ArgumentError, match="give it use_cache=True"):
            generate(model, call, cache, use_cache=False)


@pytest.mark.parametrize("more", [4, 40])
def test_all_tokens_again_where_attention_is_told_nothing(more: int) -> None:
    """Of a model that is not attached, whose generate() is not looked at: its second step has a token more
    than are cached."""
    model, _ = case("qwen3_vl")
    model.set_attn_implementation("torchpaged")
    cache = cache_of(model, max_seq_len=128)
    first = generate(model, {"input_ids": torch.randint(3, 90, (2, 7))}, cache)
    further = {"input_ids": torch.cat([first.sequences, torch.randint(3, 90, (2, more))], 1)}
    with pytest.raises(ArgumentError, match="give it use_cache=True"):
        generate(model, further, cache, use_cache=False)


@pytest.mark.parametrize("length", [9, 12, 14])
@pytest.mark.parametrize("name", ["exaone4_5", "glm4v", "paligemma2", "qwen2_5_vl", "qwen3_vl"])
def test_another_prompt_without_a_reset(name: str, length: int) -> None:
    """PaliGemma's positions begin at 1; M-RoPE's reach attention in a first prompt alone, and EXAONE's are
    made anew behind what is cached."""
    model, _ = case(name)
    prompts = [{"input_ids": torch.randint(3, 90, (2, count))} for count in (7, length)]
    with paged(model):
        cache = cache_of(model)
        generate(model, prompts[0], cache)
        with pytest.raises(ArgumentError, match=r"14 in the cache.*; call cache.reset\(\)"):
            generate(model, prompts[1], cache)
        cache.reset()
        first = generate(model, prompts[0], cache)
        further = {"input_ids": torch.cat([first.sequences, prompts[1]["input_ids"][:, :8]], 1)}
        got = generate(model, further, cache)
        same_logits(got, generate(model, further, cache_of(model)))


def test_pictures_behind_others_in_the_cache_are_refused() -> None:
    model, call = case("gemma3")
    with paged(model), torch.no_grad():
        cache = cache_of(model)
        model(call["input_ids"][:, :4] % 99, past_key_values=cache)
        with pytest.raises(UnsupportedModelError, match="behind others in the cache"):
            model(**{**call, "attention_mask": None}, past_key_values=cache)


@pytest.mark.skipif(
    transformers.__version__.startswith("5.17."), reason="it leaves the pictures of a prompt in chunks out"
)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("size", [4, 5, 6, 7, 20])
def test_chunks_of_a_prompt(size: int, dense: bool) -> None:
    """A picture at positions 3 to 6: behind the last one no chunk but the first can know that it ended."""
    model, call = case("gemma3", ("titt",))
    with paged(model):
        if size < 20:
            with pytest.raises(UnsupportedModelError, match="image"):
                generate(model, call, cache_of(model, dense=dense), prefill_chunk_size=size)
            return
        got = generate(model, call, cache_of(model, dense=dense), prefill_chunk_size=size)
    same_logits(got, generate(model, call))


@pytest.mark.parametrize("name", ["gemma3", "paligemma"])
def test_prompt_lookup(name: str) -> None:
    """PaliGemma's whole prompt is one span: candidates behind it are no chunks of it. The caller's name is
    private to transformers. Its 5.17 takes candidates for a part of the span, and is refused."""
    if name == "paligemma" and transformers.__version__.startswith("5.17."):
        pytest.skip("its candidates see each other")
    model, call = case(name, ("tit",))
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    want = model.generate(**call, **options)
    options["prompt_lookup_num_tokens"] = 3
    with paged(model):
        cache = PagedCache.for_inputs(model, **call, **options)
        assert torch.equal(model.generate(**call, **options, past_key_values=cache), want)


def test_a_forward_does_not_end_in_a_picture() -> None:
    model, call = case("gemma3", ("titt",))
    part = {"input_ids": call["input_ids"][:, :5] % 99, "token_type_ids": call["token_type_ids"]}
    with paged(model), torch.no_grad(), pytest.raises(UnsupportedModelError, match="inside an image"):
        model(**part, past_key_values=cache_of(model))


def test_a_compiled_prompt() -> None:
    """In a trace spans can't be looked at, so that an assertion on the device fires; text runs."""
    model, _ = case("gemma3")
    attach(model)
    cache = cache_of(model)
    cache.early_initialization(3, 2, 16, torch.float32, torch.device("cpu"))

    @torch.compile(backend="eager", fullgraph=True)
    def masks(groups: Tensor, x: Tensor) -> Tensor:
        both = or_masks(causal_mask_function, blockwise_overlay(groups))
        assert cache.masks.observe(MaskRequest(3, 8, 64, None, both, q_offset=x)) is None
        return x + 1

    groups = torch.full((3, 64), -1)
    assert int(masks(groups, torch.zeros((), dtype=torch.int64))) == 1
    groups[2, 4:6] = 0
    with pytest.raises(RuntimeError, match="see each other in both directions"):
        masks(groups, torch.zeros((), dtype=torch.int64))
    torch._dynamo.reset()


def test_a_backend_that_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = case("gemma3")
    with paged(model), torch.no_grad():
        cache = cache_of(model)
        model(call["input_ids"] % 99, past_key_values=cache)
        cache.reset()
        monkeypatch.setattr(type(cache.session), "plans", property(lambda self: True))
        with pytest.raises(BackendUnavailableError, match=r"plans every batch.*another backend"):
            model(**call, past_key_values=cache)


def placeholder() -> tuple[Tensor, CallMask]:
    model, call = case("gemma3")
    found: list[Tensor] = []

    def mask(*args: Any, **given: Any) -> Any:
        found.append(attention.paged_mask(*args, **given))
        return found[-1]

    attach(model)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(attention.AttentionMaskInterface._global_mapping, attention.NAME, mask)
        model(**call, past_key_values=cache_of(model))
    carried = held_by(found[0])
    assert carried is not None
    return found[0], carried


def test_what_a_placeholder_gives_its_spans_to() -> None:
    """To its own last queries (gemma4 leaves out the others in layers that share keys) and to copies."""
    mask, carried = placeholder()
    length = mask.shape[2]
    kept: list[Callable[[Tensor], Tensor]] = [
        lambda x: x[:, :, -3:, :],
        lambda x: x.contiguous(),
        lambda x: x.to("cpu"),
        lambda x: x.clone(),
    ]
    lost: list[Callable[[Tensor], Tensor]] = [
        lambda x: x[:, :, :3, :],
        lambda x: x[:, :, -3:-1, :],
        lambda x: x[:1],
        lambda x: x & True,
        lambda x: x.float(),
        lambda x: ~x,
    ]
    assert all(held_by(change(mask)) is carried for change in kept)
    assert length == 17
    assert all(held_by(change(mask)) is None for change in lost)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl", "llava"])
def test_the_engine_takes_text_alone(name: str) -> None:
    model, call = case(name, ("tit", "t"))
    text = {"input_ids": call["input_ids"] % 99, "attention_mask": call["attention_mask"]}
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    model.generate(**call, **options)  # leaves positions of pictures behind
    want = model.generate(**text, **options)
    accelerate(model, max_batch_size=2, max_seq_len=64)
    assert torch.equal(model.generate(**text, **options), want)
    for kinds in call.keys() & {"mm_token_type_ids", "token_type_ids"}:  # a processor's
        assert torch.equal(model.generate(**text, **options, **{kinds: 0 * call[kinds]}), want)
    with pytest.raises(ArgumentError, match="takes tokens alone"):
        model.generate(**call, **options)
    unaccelerate(model)


def test_cross_attention_in_one_cache_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="mllama_text_model cannot run .* keys of its images"):
        cache_of(model_of("mllama"))
