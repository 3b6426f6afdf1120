"""Families as packed tokens: requests of several lengths in one row, in chunks, get the logits that each of
them gets alone; what depends on the length of the row, of the cache or of the batch is given or refused."""

import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from model_coverage import architectures, vision_models
from model_coverage.architectures import config_of, model_of, model_types
from model_coverage.checks import difference
from torch import Tensor
from transformers import PreTrainedModel

from torchpaged import ArgumentError, AttentionMetadata, UnsupportedModelError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedModel, accelerate
from torchpaged.hf.families import FAMILIES as KNOWN_FAMILIES
from torchpaged.hf.families import Family
from torchpaged.hf.support import rotated_alike

LENGTHS = (6, 41, 23)
STEPS = ([4, 10, 7], [1, 12, 1], [1, 18, 0], [0, 1, 15])  # tokens of each request
ROPE: dict[str, Any] = {"rope_theta": 10000.0}
LONGROPE: dict[str, Any] = {
    **ROPE,
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 16,
}
#: what makes attention depend on positions, from a few tokens on
TEMPERATURES: dict[str, dict[str, Any]] = {
    "llama4_text": {
        "floor_scale": 8,
        "attn_scale": 0.7,
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
    },
    "ministral3": {
        "rope_parameters": {
            **ROPE,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 8,
        }
    },
}
#: masks, positions by tables and by offsets, windows, chunks, experts, and those that make a mask of ones
FAMILIES = ("gpt2", "biogpt", "opt", "bert", "whisper", "gemma2", "gpt_oss", "qwen3_moe", "cohere2", "phi3")


def built(model_type: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> PreTrainedModel:
    """The tiny model, with further options of its config."""
    own = architectures.OPTIONS.get(model_type, {})
    monkeypatch.setitem(architectures.OPTIONS, model_type, {**own, **options})
    return model_of(model_type, "eager")


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 99, (length,), generator=generator) for length in LENGTHS]


def alone(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of one request by transformers' eager attention, positions from 0 as generate() gives them."""
    takes = inspect.signature(model.forward).parameters
    given = {"position_ids": torch.arange(len(ids))[None]} if "position_ids" in takes else {}
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids[None], use_cache=False, **given).logits[0]
    return logits


def greedy(model: PreTrainedModel, ids: Tensor, count: int) -> list[int]:
    """New tokens of one request, without a cache."""
    for _ in range(count):
        ids = torch.cat((ids, alone(model, ids)[-1].argmax()[None]))
    return ids[-count:].tolist()


def packed(paged: PagedModel, requests: list[Tensor]) -> list[Tensor]:
    """Logits of the requests, chunks of them together in each step, in shuffled blocks."""
    size, num_blocks = paged.kv_cache.block_size, paged.kv_cache.num_blocks
    free = iter((torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(2)) + 1).tolist())
    tables = [[next(free) for _ in range(-(-len(ids) // size))] for ids in requests]
    done, found = [0] * len(requests), [[] for _ in requests]
    for step in STEPS:
        rows = [row for row, count in enumerate(step) if count]
        batch = AttentionMetadata.from_lists(
            [step[row] for row in rows],
            [done[row] + step[row] for row in rows],
            [tables[row] for row in rows],
            block_size=size,
            num_blocks=num_blocks,
        )
        ids = torch.cat([requests[row][done[row] : done[row] + step[row]] for row in rows])
        with torch.inference_mode():
            parts = paged(ids, batch).split([step[row] for row in rows])
        for row, logits in zip(rows, parts, strict=True):
            found[row].append(logits)
            done[row] += step[row]
    return [torch.cat(logits) for logits in found]


def agreement(model: PreTrainedModel) -> str:
    """Of all requests, "right" or how far off. Layers with a state per request are the engine's to prove."""
    try:
        paged = PagedModel(deepcopy(model), num_blocks=40, block_size=4)
    except ArgumentError as error:
        assert "max_num_reqs, for a model whose layers keep a state per request" in str(error)
        return "right"
    want = torch.cat([alone(model, ids) for ids in prompts()])
    return difference(torch.cat(packed(paged, prompts())), want)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_requests_in_one_row(model_type: str) -> None:
    assert agreement(model_of(model_type, "eager")) == "right"


@pytest.mark.long
@pytest.mark.slow
def test_every_decoder_is_right_or_refused() -> None:
    """All architectures that transformers maps to a causal LM."""
    wrong = {}
    for model_type in model_types():
        try:
            found = agreement(model_of(model_type, "eager"))
        except UnsupportedModelError as error:
            found = "right" if len(str(error)) > 40 else f"says nothing: {error}"
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        if found != "right":
            wrong[model_type] = found
    assert not wrong


@pytest.mark.parametrize("model_type", TEMPERATURES)
def test_temperatures_by_positions(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4's layers without rotation ask their cache how many tokens are in front."""
    assert agreement(built(model_type, monkeypatch, **TEMPERATURES[model_type])) == "right"


WAYS: dict[str, dict[str, Any]] = {
    "graphs": {"prefill_chunk_size": 8},
    "one by one": {"prefill_chunk_size": 8, "graphs": False},
    "launches of 3": {"steps_per_launch": 3, "rolling": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_llama_4_in_the_engine(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("llama4_text", monkeypatch, **TEMPERATURES["llama4_text"])
    want = [greedy(model, ids, 8) for ids in prompts()]
    generator = Generator(model, max_batch_size=2, max_seq_len=64, block_size=4, **WAYS[way])
    outputs = generator.generate(
        [ids.tolist() for ids in prompts()], SamplingParams(max_new_tokens=8, ignore_eos=True)
    )
    assert [output.token_ids for output in outputs] == want


@pytest.mark.parametrize("model_type", ["bart", "mbart", "pegasus"])
def test_a_mask_of_the_models_own_is_refused_by_name(model_type: str) -> None:
    """They place their tokens by the length of the cache, whatever positions they are given."""
    model = model_of(model_type, "eager")
    with pytest.raises(UnsupportedModelError, match=rf"{model_type} makes an attention mask.*PagedCache"):
        Generator(model)


def test_those_that_make_ones_are_known() -> None:
    """Decoders that take positions, and yet would make a mask."""
    made = set()
    for model_type in FAMILIES:
        model, seen = model_of(model_type, "eager"), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "torchpaged.hf.step_cache.PackedMasks.observe",
                lambda self, asked, seen=seen: seen.append(asked.padding),
            )
            patch.setattr("torchpaged.hf.owner.family_of", lambda model_type: Family())
            PagedModel(model, num_blocks=4)
        made |= {model_type} if any(mask is not None for mask in seen) else set()
    assert made <= {name for name, family in KNOWN_FAMILIES.items() if family.makes_ones}
    assert "biogpt" in made


@pytest.mark.parametrize(
    ("model_type", "options", "kind"),
    [
        ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}, "longrope"),
        (
            "phimoe",
            {
                "original_max_position_embeddings": 16,
                "rope_parameters": {**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.4},
            },
            "longrope",
        ),
        (
            "llama",
            {
                "max_position_embeddings": 16,
                "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0},
            },
            "dynamic",
        ),
    ],
    ids=["phi3", "phimoe", "dynamic"],
)
def test_rotations_by_the_longest_text(
    model_type: str, options: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right up to the length where they change; longer requests, which would change those beside them, and
    chunks of one that would differ, are refused."""
    model = built(model_type, monkeypatch, **options)
    assert rotated_alike(model) == (16, kind)
    short = [prompts()[0], prompts()[1][:11]]  # of 16 tokens in the end
    want = [greedy(model, ids, 16 - len(ids)) for ids in short]
    generator = Generator(model, block_size=4, max_batch_size=2, prefill_chunk_size=8)
    assert generator.max_seq_len == 16
    assert generator.scheduler.prefixes is not None
    outputs = generator.generate([ids.tolist() for ids in short], SamplingParams(ignore_eos=True))
    assert [output.token_ids for output in outputs] == want
    with pytest.raises(ArgumentError, match=r"max_seq_len: expected 2 to 16 tokens.*got 17"):
        Generator(model, max_seq_len=17)
    with pytest.raises(ArgumentError, match=r"max_seq_len: expected 2 to 16 tokens.*got 17"):
        accelerate(model, max_seq_len=17)
    paged = PagedModel(model, num_blocks=40, block_size=4)
    with pytest.raises(ArgumentError, match="max_seq_len: expected 2 to 16 tokens.*got 17"):
        Generator(paged, max_seq_len=17)
    with pytest.raises(ArgumentError, match=rf"requests of at most 16 tokens.*{kind}.*one of 22"):
        packed(paged, prompts())
    assert not paged.kv_cache[0].k_cache[:, :, :, 0].count_nonzero(1).gt(4).any()


def test_other_rotations_take_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    yarn = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    model = built("llama", monkeypatch, rope_parameters=yarn)
    assert rotated_alike(model) == (None, "")
    assert agreement(model) == "right"


def test_wrong_models_are_named() -> None:
    llama = config_of("llama")
    t5 = transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    doors: tuple[Callable[[Any], Any], ...] = (Generator, lambda model: PagedModel(model, num_blocks=4))
    for door in doors:
        for model, got in (
            (None, "got None"),
            ("gpt2", "got 'gpt2'"),
            (llama, "got LlamaConfig"),
            (3, "got int"),
        ):
            with pytest.raises(ArgumentError, match=f"model: expected a causal LM.*{got}; load one with"):
                door(model)
        with pytest.raises(
            UnsupportedModelError, match=r"T5ForConditionalGeneration: the engine runs causal LMs"
        ):
            door(transformers.T5ForConditionalGeneration(t5))
        with pytest.raises(UnsupportedModelError, match=r"LlamaModel has no head"):
            door(transformers.LlamaModel(llama))


def test_models_that_need_pictures_are_refused() -> None:
    model = vision_models.model_of("blip-2")
    with pytest.raises(UnsupportedModelError, match="Blip2.* can't run without pixel_values"):
        Generator(model)


@pytest.mark.parametrize("given", ["1GB", 1.5e6, True])
def test_memory_is_bytes(given: Any) -> None:
    model = model_of("llama", "eager")
    with pytest.raises(ArgumentError, match=r"kv_cache_memory: expected None or bytes.*2\*\*30"):
        Generator(model, kv_cache_memory=given)
    with pytest.raises(ArgumentError, match=r"memory_budget: expected None or an integer.*2\*\*30"):
        PagedModel(model, memory_budget=given)
    with pytest.raises(ArgumentError, match="num_blocks: expected None or an integer"):
        PagedModel(model, num_blocks=given)


def test_memory_and_blocks_are_not_given_at_once() -> None:
    with pytest.raises(ArgumentError, match="kv_cache_memory: .*no num_blocks with it, got 1000000 and 8"):
        Generator(model_of("llama", "eager"), kv_cache_memory=1_000_000, num_blocks=8)
