"""Rows of a PagedCache whose pool is too small for all of them in full: they take blocks as they grow, and
share them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import padded_prompts, tiny
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import CompileConfig, PreTrainedModel

from torchpaged.custom_ops.errors import ArgumentError, BlockPoolExhaustedError
from torchpaged.hf import PagedCache
from torchpaged.prefixes import CascadeCosts

FREE = CascadeCosts(0.0, 0.0, 1.0, 1e9, "whatever is shared pays")
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def paged(name: str = "Llama", **options: Any) -> PreTrainedModel:
    model = tiny(name, **options)
    model.set_attn_implementation("torchpaged")
    return model


def test_four_beams_take_little_more_than_one_sequence() -> None:
    """At most 1.3 sequences and a tail per beam, where rows in full would take four. A model that knows what
    it wants: of nearly equal scores beams part earlier and hold more."""
    model = tiny("Llama", initializer_range=0.3)
    ids = torch.randint(3, 99, (1, 6), generator=torch.Generator().manual_seed(2))
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **GREEDY}
    call |= {"num_beams": 4, "max_new_tokens": 240}
    want = model.generate(**call)
    model.set_attn_implementation("torchpaged")
    one = -(-245 // 8)
    most = int(1.3 * one) + 4
    cache = PagedCache.for_inputs(model, **call, block_size=8, num_blocks=most + 1)
    assert torch.equal(model.generate(**call, past_key_values=cache), want)
    assert one < cache.pool.peak_used <= most
    cache.reset()
    assert cache.pool.num_used == 0


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams_returned": {"num_beams": 4, "num_return_sequences": 3},
    "sampled": {"do_sample": True, "temperature": 0.8, "num_return_sequences": 3},
    "chunked_prefill": {"prefill_chunk_size": 4, "num_beams": 3},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_tokens_are_transformers_own(name: str, mode: str) -> None:
    """Padded rows, rings of blocks, prefixes that are read once, tokens taken back."""
    model, options = tiny(name), {**GREEDY, **MODES[mode]}
    inputs = padded_prompts(1 if mode == "prompt_lookup" else 2)
    torch.manual_seed(7)
    want = model.generate(**inputs, **options)
    model.set_attn_implementation("torchpaged")
    rows = inputs["input_ids"].shape[0] * options.get("num_beams", options.get("num_return_sequences", 1))
    for cascade in (FREE, False):
        cache = PagedCache(
            model.config, rows + 1, 40, block_size=4, num_blocks=9 * rows + 1, cascade=cascade, sliding_step=4
        )
        assert cache.rows.grows
        torch.manual_seed(7)
        assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), want)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_beams(kv_dtype: str) -> None:
    model, inputs, tokens = paged(), padded_prompts(), []
    options = {**GREEDY, "num_beams": 3}
    for num_blocks in (None, 40):
        cache = PagedCache.for_inputs(
            model, **inputs, **options, block_size=4, kv_dtype=kv_dtype, num_blocks=num_blocks
        )
        tokens.append(model.generate(**inputs, **options, past_key_values=cache))
    assert cache.rows.grows
    assert torch.equal(*tokens)


def test_a_pool_that_runs_dry_changes_nothing() -> None:
    """Fewer rows go on from there."""
    model, ids = paged(), torch.randint(3, 99, (3, 9))
    cache = PagedCache(model.config, 3, 20, block_size=4, num_blocks=10)
    with torch.no_grad():
        want = model(ids[1:2], past_key_values=None, use_cache=False).logits
        model(ids[:, :8], past_key_values=cache)
        tables = [list(row) for row in cache.rows.blocks.rows]
        with pytest.raises(BlockPoolExhaustedError, match="num_blocks=16"):
            model(torch.cat([ids] * 2, 1)[:, 8:14], past_key_values=cache)
        assert cache.rows.blocks.rows == tables
        assert cache.rows.lengths() == [8, 8, 8]
        cache.batch_select_indices(torch.tensor([1]))
        got = model(ids[1:2, 8:], past_key_values=cache).logits
    torch.testing.assert_close(got[:, -1], want[:, -1], rtol=1e-4, atol=1e-4)
    cache.reset()
    assert cache.pool.num_used == 0


def test_max_seq_len_is_refused_first() -> None:
    model = paged()
    cache = PagedCache(model.config, 2, 10, block_size=4, num_blocks=5)
    with torch.no_grad():
        model(torch.randint(3, 99, (1, 8)), past_key_values=cache)
        with pytest.raises(ArgumentError, match="max_seq_len: expected room for 11 tokens"):
            model(torch.randint(3, 99, (1, 3)), past_key_values=cache)
        model(torch.randint(3, 99, (1, 2)), past_key_values=cache)


def _after(change: Callable[[PagedCache], None]) -> list[torch.Tensor]:
    """Logits behind a change of the rows, with a tight pool and with a large one."""
    model, results = paged(), []
    ids = torch.randint(3, 99, (2, 20), generator=torch.Generator().manual_seed(4))
    for num_blocks in (19, None):
        cache = PagedCache(model.config, 4, 24, block_size=4, num_blocks=num_blocks)
        with torch.no_grad():
            model(ids[:, :11], past_key_values=cache)
            change(cache)
            more = ids[:1, 11:].expand(cache.batch_size, -1)
            steps = [model(more[:, i : i + 1], past_key_values=cache).logits for i in range(5)]
        results.append(torch.cat(steps, 1))
        assert cache.rows.grows == (num_blocks is not None)
    return results


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: (cache.reorder_cache(torch.tensor([1, 1, 0])), cache.crop(-5)),
        lambda cache: (cache.crop(-9), cache.batch_repeat_interleave(2)),
    ],
)
def test_rows_are_changed(change: Any) -> None:
    got, want = _after(change)
    torch.testing.assert_close(got, want)


def test_generates_own_compiled_steps_grow() -> None:
    """transformers asks for the mask's size outside the graph: there the rows get their next block."""
    torch._dynamo.reset()
    model, inputs = paged(), padded_prompts()
    want = model.generate(**inputs, **GREEDY, past_key_values=PagedCache(model.config, 2, 64))
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    config._compile_all_devices = True  # transformers' own switch for testing the path on a CPU
    cache = PagedCache(model.config, 2, 64, block_size=4, num_blocks=20)
    got = model.generate(**inputs, **GREEDY, past_key_values=cache, compile_config=config)
    assert torch.equal(got, want)
    assert cache.pool.num_used == 2 * 8


def test_rows_are_reordered_behind_a_graph_that_was_replayed() -> None:
    """Which moved them on without the host."""
    model = paged()
    ids = torch.randint(3, 99, (2, 20))
    cache = PagedCache(model.config, 2, 40, block_size=4, cascade=False)

    def step(token: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(token, position_ids=place, past_key_values=cache).logits
        return logits

    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache)
        graph = make_fx(step)(ids[:, 6:7], torch.full((2, 1), 6))
        for place in range(7, 14):
            graph(ids[:, place : place + 1], torch.full((2, 1), place))
        assert cache.rows.lengths() == [14, 14]
        cache.reorder_cache(torch.tensor([1, 1]))
        got = step(ids[:, 14:15], torch.full((2, 1), 14))
        for row in (0, 1):  # a step of one writes over what the other one shares
            text = torch.cat([ids[1:, :14], ids[row : row + 1, 14:15]], 1)
            want = model(text, use_cache=False).logits[:, -1]
            torch.testing.assert_close(got[row : row + 1, -1], want, rtol=1e-4, atol=1e-4)
