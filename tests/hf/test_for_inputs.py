"""A cache sized by the call that it is for, the choice to gather that is made by itself, and which number to
raise."""

from typing import Any

import pytest
import torch
from families import build
from model_coverage import examine
from model_coverage.architectures import model_of
from models import padded_prompts, tiny
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig

from torchpaged import ArgumentError, BlockPoolExhaustedError
from torchpaged.hf import PagedCache, PagedEncoderDecoderCache, attach, fuse, paged
from torchpaged.hf.families import family_of

GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
CALLS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "greedy": (GREEDY, (2, 25)),
    "max_length": ({"max_length": 29, "do_sample": False}, (2, 29)),
    "beams": ({**GREEDY, "num_beams": 3}, (6, 25)),
    "sequences": ({"max_new_tokens": 5, "do_sample": True, "num_return_sequences": 2}, (4, 25)),
    "beams and sequences": ({**GREEDY, "num_beams": 4, "num_return_sequences": 2}, (8, 25)),
    "a generation config": ({"generation_config": GenerationConfig(num_beams=2, max_new_tokens=4)}, (4, 24)),
    "an argument over it": (
        {"generation_config": GenerationConfig(max_new_tokens=4, do_sample=False), "max_new_tokens": 6},
        (2, 26),
    ),
    "assisted": ({**GREEDY, "prompt_lookup_num_tokens": 3}, (1, 28)),
}


@pytest.mark.parametrize("name", CALLS)
def test_sizes(name: str) -> None:
    """Neither a row nor a token too few, and no block too many: the pool is taken whole."""
    options, sizes = CALLS[name]
    model, inputs = tiny("Llama"), padded_prompts(rows=1 if name == "assisted" else 2)
    call = {**inputs, **options}
    torch.manual_seed(0)
    want = model.generate(**call)
    model.set_attn_implementation("torchpaged")
    cache = PagedCache.for_inputs(model, **call, block_size=4)
    assert (cache.rows.max_rows, cache.max_seq_len, cache.block_size) == (*sizes, 4)
    torch.manual_seed(0)
    assert torch.equal(model.generate(**call, past_key_values=cache), want)
    assert cache.pool.peak_used <= cache.pool.num_usable == sizes[0] * -(-sizes[1] // 4)


def test_sizes_of_a_decoder_behind_an_encoder() -> None:
    model = build("Bart", "ForConditionalGeneration", "torchpaged")
    ids = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(1))
    call = {"input_ids": ids, "decoder_input_ids": ids[:, :3], **GREEDY}
    cache = PagedCache.for_inputs(model, **call)
    assert (cache.rows.max_rows, cache.max_seq_len) == (2, 9)
    both = EncoderDecoderCache(cache, DynamicCache(config=model.config))
    assert model.generate(**call, past_key_values=both).shape == (2, 9)  # it starts with a token of its own
    with pytest.raises(ArgumentError, match=r"decoder_input_ids: .*PagedEncoderDecoderCache.for_inputs"):
        PagedCache.for_inputs(model, input_ids=ids, **GREEDY)


def test_the_model_s_own_generation_config() -> None:
    model, inputs = tiny("Llama"), padded_prompts()
    with pytest.raises(ArgumentError, match="max_new_tokens: expected the number of tokens.*generate"):
        PagedCache.for_inputs(model, **inputs)
    model.generation_config.max_new_tokens = 7
    assert PagedCache.for_inputs(model, **inputs).max_seq_len == 27
    with pytest.raises(ArgumentError, match="input_ids: expected a tensor.*got list"):
        PagedCache.for_inputs(model, input_ids=[[1, 2]])


def test_a_full_pool_says_which_number_to_raise() -> None:
    model, inputs = tiny("Llama"), padded_prompts()
    model.set_attn_implementation("torchpaged")
    cache = PagedCache.for_inputs(model, **inputs, **GREEDY, block_size=4, num_blocks=9)
    with pytest.raises(BlockPoolExhaustedError, match=r"2 rows of max_seq_len=25 take 14 .*num_blocks=15"):
        model.generate(**inputs, **GREEDY, past_key_values=cache)
    cache = PagedCache.for_inputs(model, **inputs, **GREEDY, block_size=4, num_blocks=15)
    model.generate(**inputs, **GREEDY, past_key_values=cache)


@pytest.mark.parametrize("name", ["diffllama", "doge", "jetmoe", "inkling_text"])
def test_models_that_need_dense_get_it(name: str) -> None:
    row = examine(name, compiled=False)
    assert (row.mode, row.reason) == ("dense", family_of(name).needs_dense)


def test_dense_is_said() -> None:
    config = build("DiffLlama").config
    cache = PagedCache(config, 2, 32)
    assert cache.dense
    assert "gathered: diffllama regroups its cached values" in cache.describe()
    cache = PagedCache(config, 2, 32, dense=False)
    assert not cache.dense
    assert not cache.dense_reason
    assert "gathered" not in cache.describe()
    assert not PagedCache(tiny("Llama").config, 2, 32).dense


def test_a_model_that_caches_nothing_by_default() -> None:
    """MPT's config says use_cache=False, and with it its generation_config: every step would run, and append,
    all tokens."""
    from transformers import MptConfig, MptForCausalLM

    torch.manual_seed(0)
    model = MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=99, max_seq_len=64)).eval()
    call = {**padded_prompts(), **GREEDY}
    want = model.generate(**call)
    with paged(model):
        with pytest.raises(ArgumentError, match="use_cache: expected True.*got False.*give use_cache=True"):
            PagedCache.for_inputs(model, **call)
        cache = PagedCache(model.config, 2, 500)
        with pytest.raises(ArgumentError, match="use_cache: expected True for mpt.*generation_config"):
            model.generate(**call, past_key_values=cache)
        call["use_cache"] = True
        cache = PagedCache.for_inputs(model, **call)
        assert torch.equal(model.generate(**call, past_key_values=cache), want)
        del call["use_cache"]
        model.config.use_cache = model.generation_config.use_cache = True
        for cache in (PagedCache(model.config, 2, 500), PagedCache.for_inputs(model, **call)):
            assert torch.equal(model.generate(**call, past_key_values=cache), want)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Gemma3"])
@pytest.mark.parametrize("fused", [False, True])
def test_all_tokens_again_in_every_step(name: str, fused: bool) -> None:
    """Since transformers 5.24 no mask tells them from the next turn."""
    model = tiny(name)
    call, cache = {"input_ids": torch.randint(3, 99, (2, 5)), **GREEDY}, PagedCache(model.config, 2, 500)
    want = model.generate(**call)
    model.set_attn_implementation("torchpaged")
    if fused:
        fuse(model, count=False)
    with pytest.raises(ArgumentError, match="5 in the cache|5 tokens in the cache.*give it use_cache=True"):
        model.generate(**call, past_key_values=cache, use_cache=False)
    cache.reset()
    assert torch.equal(model.generate(**call, past_key_values=cache), want)


@pytest.mark.parametrize("name", ["olmo3", "longcat_flash", "llama"])
def test_models_that_keep_use_cache_from_their_attention(name: str) -> None:
    """It always gets its layer's default, False: the next turn, of padded rows too, is not a prompt anew, nor
    is a chunk of one whose first row is padding so far. (Llama's attention is told.)"""
    model, inputs = model_of(name), padded_prompts()
    first, cache = model.generate(**inputs, **GREEDY), PagedCache(model.config, 2, 64)
    turn = torch.cat([first, torch.randint(3, 90, (2, 5))], 1)
    new = torch.ones(2, turn.shape[1] - 20, dtype=torch.int64)
    mask = torch.cat([inputs["attention_mask"], new], 1)
    second = model.generate(turn, attention_mask=mask, **GREEDY)
    with paged(model):
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **GREEDY), first)
        got = model.generate(turn, attention_mask=mask, past_key_values=cache, **GREEDY)
        assert torch.equal(got, second)
        cache.reset()
        assert torch.equal(
            model.generate(**inputs, past_key_values=cache, prefill_chunk_size=3, **GREEDY), first
        )
        for rows in (slice(0, 2), slice(1, 2)):  # padded ones, and none
            call = {name: given[rows] for name, given in inputs.items()}
            cache.reset()
            with pytest.raises(ArgumentError, match="in the cache.*give it use_cache=True|attention_mask"):
                model.generate(**call, past_key_values=cache, use_cache=False, **GREEDY)


@pytest.mark.parametrize("name", ["olmo3", "llama", "gpt2"])
def test_another_prompt_without_use_cache_behind_padded_rows(name: str) -> None:
    """Its mask, of ones, tells nothing of their padding; all of it would be written again in each step."""
    model, inputs = model_of(name), padded_prompts()
    model.set_attn_implementation("torchpaged")
    ids = torch.randint(3, 90, (2, 30))  # more than are cached: its second step has all of them again
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    for flip in (False, True):  # whether the first row is padded
        first = {key: given.flip(0) if flip else given for key, given in inputs.items()}
        cache = PagedCache(model.config, 2, 256)
        model.generate(**first, past_key_values=cache, **GREEDY)
        with pytest.raises(ArgumentError, match="give it use_cache=True"):
            model.generate(**call, past_key_values=cache, **GREEDY)


@pytest.mark.parametrize("name", ["llama", "fused", "bloom", "falcon", "gemma2", "mpt", "xglm"])
def test_assisted_generation_over_a_used_cache(name: str) -> None:
    """transformers runs all of the prompt again, behind itself: wrong tokens with its own cache. Attention
    is not told of positions in Bloom, Falcon, MPT and XGLM."""
    model = attach(model_of("llama" if name == "fused" else name))
    if name == "fused":
        fuse(model, count=False)
    ids, cache = torch.randint(3, 90, (1, 5)), PagedCache(model.config, 1, 64)
    call: dict[str, Any] = {**GREEDY, "min_new_tokens": 5, "use_cache": True}
    want = model.generate(ids, **call)
    turn = torch.cat((want, ids[:, :2]), 1)
    wanted, lookup = model.generate(turn, **call), {"prompt_lookup_num_tokens": 2, **call}
    for _ in range(2):
        assert torch.equal(model.generate(ids, past_key_values=cache, **lookup), want)
        assert torch.equal(model.generate(turn, past_key_values=cache, **call), wanted)
        with pytest.raises(ArgumentError, match="16 in the cache|one with 16.*reset"):
            model.generate(wanted, past_key_values=cache, **lookup)
        cache.reset()


def test_a_model_for_its_config_and_a_config_for_its_model() -> None:
    model, call = tiny("Llama"), {**padded_prompts(), **GREEDY}
    for make in (PagedCache, PagedEncoderDecoderCache):
        with pytest.raises(ArgumentError, match="config: expected the config.*got a LlamaForCausalLM; pass"):
            make(model, 2, 32)
        with pytest.raises(ArgumentError, match="model: expected the model.*got a LlamaConfig; pass"):
            make.for_inputs(model.config, **call)
    with pytest.raises(ArgumentError, match=r"call for_inputs\(model, \*\*call\)"):
        PagedCache(model)  # type: ignore[call-arg]
