"""Rows of a PagedCache that share blocks: decode steps read these once where that pays, and the tokens are
transformers' own."""

from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of
from models import padded_prompts, tiny
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache

from torchpaged import ArgumentError, BackendUnavailableError, UnsupportedModelError
from torchpaged.hf import PagedCache, attach
from torchpaged.prefixes import CascadeCosts

FREE = CascadeCosts(0.0, 0.0, 1.0, 1e9, "whatever is shared pays")
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize(("name", "layers"), [("Llama", 3), ("GptOss", 1), ("Gemma2", 1), ("Mistral", 0)])
def test_beams(name: str, layers: int, passes: list[int]) -> None:
    """Of layers with sinks and soft caps those without a window read once, and the others row by row in the
    same step."""
    model, inputs = tiny(name), padded_prompts()
    options = {**GREEDY, "num_beams": 3}
    want = model.generate(**inputs, **options)
    model.set_attn_implementation("torchpaged")
    for cascade in (FREE, False, True):
        cache = PagedCache(model.config, 6, 32, block_size=4, cascade=cascade)
        assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), want)
        if cascade == FREE:
            # 7 decode steps, the first of which is before the first reordering or just behind it
            assert len(passes) in (6 * layers, 7 * layers)
            assert set(passes) <= {6}
        assert len(passes) in (6 * layers, 7 * layers), "it does not pay, or is switched off"


def test_a_prompt_that_many_rows_continue(passes: list[int]) -> None:
    """transformers' way to reuse a prompt: prefilled once, its rows repeated, generate() goes on."""
    model, prompt = tiny("Llama"), torch.randint(3, 99, (1, 18))
    ids = torch.cat([prompt.expand(3, -1), torch.randint(3, 99, (3, 4))], 1)
    with torch.no_grad():
        theirs = DynamicCache(config=model.config)
        model(prompt, past_key_values=theirs)
        theirs.batch_repeat_interleave(3)
        want = model.generate(ids, **GREEDY, past_key_values=theirs)
        model.set_attn_implementation("torchpaged")
        ours = PagedCache(model.config, 3, 32, block_size=4, cascade=FREE)
        model(prompt, past_key_values=ours)
        ours.batch_repeat_interleave(3)
        used = ours.pool.num_used
        assert torch.equal(model.generate(ids, **GREEDY, past_key_values=ours), want)
    assert used == 3 * 8 - 2 * 4, "four full blocks are shared"
    assert passes == [3] * 7 * 3, "every decode step, in every layer"
    ours.reset()
    assert not ours.prefixes.active


def test_a_prompt_that_rows_of_gemma_4_continue(passes: list[int]) -> None:
    """Its layers that share keys attend with one query per row of a forward of several, which is no decode
    step to the others."""
    model, prompt = model_of("gemma4_text"), torch.randint(3, 90, (1, 18))
    ids = torch.cat([prompt.expand(3, -1), torch.randint(3, 90, (3, 4))], 1)
    want = model.generate(ids, **GREEDY)
    attach(model)
    cache = PagedCache(model.config, 3, 32, block_size=4, cascade=FREE)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    cache.batch_repeat_interleave(3)
    assert torch.equal(model.generate(ids, **GREEDY, past_key_values=cache), want)
    assert set(passes) == {3}


@pytest.mark.slow
def test_one_trace_for_all_groups() -> None:
    """A compiled step: one graph with groups and one without, over growing lengths and other groups."""
    torch._dynamo.reset()
    model = tiny("Llama")
    model.set_attn_implementation("torchpaged")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    ids = torch.randint(3, 99, (4, 24))
    cache = PagedCache(model.config, 4, 40, block_size=4, cascade=FREE)
    orders = {12: [0, 0, 0, 0], 16: [0, 1, 1, 3], 20: [0, 1, 1, 3]}
    history = ids.clone()
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        for step in range(8, 24):
            if step in orders:
                cache.reorder_cache(torch.tensor(orders[step]))
                history[:, :step] = history[orders[step], :step]
            at = {"input_ids": history[:, step : step + 1], "position_ids": torch.full((4, 1), step)}
            logits = compiled(**at, past_key_values=cache).logits
            want = model(history[:, : step + 1], use_cache=False).logits[:, -1:]
            torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
            assert cache.prefixes.active == (step >= 12)
    assert counter.frame_count == 2


def test_tokens_taken_back(passes: list[int]) -> None:
    """Groups end where the cut is: what lies behind it belongs to each row alone."""
    model, ids, more = tiny("Llama"), torch.randint(3, 90, (1, 12)), torch.randint(3, 90, (2, 6))
    cache = PagedCache(model.config, 2, 32, block_size=4, cascade=FREE)
    with torch.no_grad():
        want = model(torch.cat([ids[:, :5].expand(2, -1), more], 1)).logits[:, 5:]
        model.set_attn_implementation("torchpaged")
        model(ids.expand(2, -1), past_key_values=cache)
        cache.reorder_cache(torch.tensor([0, 0]))
        step = cache.prefixes._step
        assert cache.prefixes.active
        assert step is not None
        assert step.shared.lens.tolist()[0] == 12
        cache.crop(-7)
        assert cache.prefixes.active
        assert step.shared.lens.tolist()[0] == 4
        for place in range(6):
            got = model(more[:, place : place + 1], past_key_values=cache).logits[:, 0]
            torch.testing.assert_close(got, want[:, place], rtol=1e-4, atol=1e-4)
    assert len(passes) == 6 * 3


def test_what_cascade_takes() -> None:
    with pytest.raises(ArgumentError, match="cascade: expected True, False or CascadeCosts"):
        PagedCache(tiny("Llama").config, 2, 32, cascade="auto")  # type: ignore[arg-type]


# --------------------------------------------------------------------------- the same bits in every batch
def test_batch_invariant_attention(passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention gives a row is what it gives that row alone, bit by bit; no row is read in a group."""
    model = tiny("Llama")
    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, 3, 40, block_size=4, cascade=FREE, batch_invariant=True)
    ids, compared = torch.randint(3, 99, (1, 14)), 0
    with torch.no_grad():
        model(ids, past_key_values=cache)
        assert cache.choice.name == "reference"
        assert all(spec.batch_invariant for spec in cache.backend.specs)
        cache.batch_repeat_interleave(3)
        ops = cache.backend.ops

        def both(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            table: Tensor,
            lens: Tensor,
            starts: Tensor,
            out: Tensor,
            *rest: Any,
            **o: Any,
        ) -> None:
            nonlocal compared
            ops.paged_attention(q, k, v, table, lens, starts, out, *rest, **o)
            for row in range(3):
                one, alone = slice(row, row + 1), torch.empty_like(out[row : row + 1])
                ops.paged_attention(q[one], k, v, table[one], lens[one], starts[:2], alone, *rest, **o)
                assert torch.equal(alone, out[one])
                compared += 1

        monkeypatch.setattr(cache.backend, "ops", ops._replace(paged_attention=both))
        for _ in range(3):
            model(torch.randint(3, 99, (3, 1)), past_key_values=cache)
    assert compared == 3 * 3 * 3
    assert not passes
    assert not cache.prefixes.active


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "cpu"}, BackendUnavailableError, "batch_invariant is not declared"),
        ({"dense": True}, UnsupportedModelError, "batch_invariant is not held where keys are gathered"),
        ({"kv_dtype": "fp8_e4m3"}, ArgumentError, "kv_scales: expected scales, with batch_invariant=True"),
    ],
    ids=["backend", "dense", "scales"],
)
def test_where_it_is_not_held(options: dict[str, Any], error: Any, message: str) -> None:
    model = tiny("Llama")
    model.set_attn_implementation("torchpaged")
    with pytest.raises(error, match=message), torch.no_grad():
        cache = PagedCache(model.config, 2, 32, batch_invariant=True, **options)
        model(torch.tensor([[5, 6]]), past_key_values=cache)
