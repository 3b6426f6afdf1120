"""The engine over layers with a window: right tokens every way, and memory that does not grow."""

from typing import Any

import pytest
import torch
from engine_requests import interrupt_a_read
from tiny_models import tiny_model

from torchpaged import AttentionMetadata
from torchpaged.backends import Limits
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedModel

COMMON: dict[str, Any] = {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 8}
SLIDING, FULL = "sliding_attention", "full_attention"
MODELS = {
    "Mistral": {},
    "Gemma2": {"layer_types": [SLIDING, FULL, SLIDING], "query_pre_attn_scalar": 8},
    "Llama4Text": {
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", FULL, "chunked_attention"],
        "no_rope_layers": [1, 1, 1],
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "interleave_moe_layer_step": 1,
        "moe_layers": [],
    },
}
ROLLS = {"Mistral": [True, True, True], "Gemma2": [True, False, True], "Llama4Text": [True, False, True]}
PROMPTS = [[(7 * i + j) % 90 + 5 for j in range(length)] for i, length in enumerate((3, 41, 17, 60, 9))]
SAMPLING = SamplingParams(max_new_tokens=24, ignore_eos=True)
SIZES: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 96, "block_size": 4, "prefill_chunk_size": 12}


def make(name: str) -> Any:
    return tiny_model(name, **COMMON | MODELS[name])


def tokens(generator: Generator) -> list[list[int]]:
    return [output.token_ids for output in generator.generate(PROMPTS, SAMPLING)]


def eager(name: str) -> list[list[int]]:
    """Greedy tokens of transformers' own attention, without a cache."""
    model, found = make(name), []
    model.set_attn_implementation("eager")
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(SAMPLING.max_new_tokens):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "launches of 3": {"steps_per_launch": 3, "prefill_buckets": [12]},
    "one by one": {"graphs": False},
    "short of blocks": {"num_blocks": 30},
    "fused": {"fuse": True},
}


@pytest.fixture(scope="module")
def want() -> dict[str, list[list[int]]]:
    return {}


@pytest.mark.slow_cases(but=("Gemma2-launches of 3",))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_every_way_gives_eager_tokens(name: str, way: str, want: dict[str, list[list[int]]]) -> None:
    """Prompts in chunks, more requests than rows, rows that move, requests that are put back."""
    if way == "fused" and name == "Llama4Text":
        pytest.skip("fuse() does not know this family")
    options = SIZES | WAYS[way]
    want.setdefault(name, []) or want[name].extend(eager(name))
    generator = Generator(make(name), **options)
    assert [layer.rolls for layer in generator.model._cache.layers] == ROLLS[name]
    for _ in range(2):  # with rings that other requests had before
        assert tokens(generator) == want[name]
    assert generator.model.rings.num_used == 0
    assert bool(generator.stats.preemptions) == (way == "short of blocks")
    every = Generator(make(name), **options, rolling=False)
    assert every.model.rings is None
    assert tokens(every) == want[name]


def test_memory_does_not_depend_on_the_requests_length() -> None:
    """10,240 tokens: the blocks in use and the pools' bytes are those of short requests."""
    model = tiny_model("Mistral", **COMMON | {"max_position_embeddings": 10_300, "num_hidden_layers": 1})
    options: dict[str, Any] = {"max_batch_size": 1, "prefill_chunk_size": 512, "num_checkpoints": 0}
    short = Generator(model, max_seq_len=1024, **options)
    generator = Generator(model, max_seq_len=10_300, **options)
    rings, keys = generator.model.rings, generator.model.kv_cache[0].k_cache
    assert generator.model.kv_cache.num_bytes == short.model.kv_cache.num_bytes
    request = generator.submit(
        torch.randint(5, 99, (10_240,)).tolist(), SamplingParams(max_new_tokens=8, ignore_eos=True)
    )
    used, filled = set(), set()
    for _ in generator.stream([request]):
        used.add(rings.num_used)
        filled.add(int((keys.flatten(1).abs().sum(1) > 0).sum()))
    assert used <= {1, 0}
    assert filled == {rings.blocks.blocks_per_ring}


def test_lost_steps_are_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that broke off have written over what the window of the last known token saw."""
    small: dict[str, Any] = {**SIZES, "prefill_chunk_size": 2}
    plain = Generator(make("Gemma2"), **small, rolling=False)
    want = [output.token_ids for output in plain.generate(PROMPTS[:1], SAMPLING)]
    generator = Generator(make("Gemma2"), **small, steps_per_launch=12)
    interrupt_a_read(generator, monkeypatch)
    request = generator.submit(PROMPTS[0], SAMPLING)
    found: list[int | None] = []
    broken = 0
    while generator._requests:
        try:
            found += [event.token_id for event in generator.step()]
        except KeyboardInterrupt:
            broken += 1
    assert broken == 1
    assert [found] == want
    assert request == 0
    assert generator.model.rings.num_used == 0
    assert generator.pool.num_used == 0


def test_a_new_engine_over_the_same_paged_model_has_all_rings() -> None:
    """The one before was dropped with requests that had not ended."""
    limits = Limits(max_num_reqs=2, max_num_tokens=24, max_blocks_per_req=24)
    model = PagedModel(make("Gemma2"), num_blocks=60, block_size=4, limits=limits, sliding_step=12)
    streams = []
    for _ in range(2):
        generator = Generator(model, max_batch_size=2, max_seq_len=96, prefill_chunk_size=12)
        for prompt in PROMPTS[:2]:
            generator.submit(prompt, SAMPLING)
        streams.append(generator.stream())
        next(streams[-1])
        assert model.rings is not None
        assert model.rings.num_used == 2
    streams[0].close()  # type: ignore[attr-defined]
    assert model.rings.num_used == 2  # those of the new one


def test_engines_in_turns_over_one_paged_model_keep_all_rings() -> None:
    """The older one takes rings after the newer one was made, and gives each of them back; also where one of
    them breaks off, or cancels what it had when the other came."""
    limits = Limits(max_num_reqs=2, max_num_tokens=24, max_blocks_per_req=24)
    model = PagedModel(make("Gemma2"), num_blocks=60, block_size=4, limits=limits, sliding_step=12)
    options: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 96, "prefill_chunk_size": 12}
    engines = [Generator(model, **options), Generator(model, **options, graphs=False)]
    want = tokens(Generator(make("Gemma2"), **SIZES))
    assert model.rings is not None
    for turn in range(6):
        assert tokens(engines[turn % 2]) == want
        assert model.rings.num_used == 0
    left = engines[0].submit(PROMPTS[1], SAMPLING)
    engines[0].step()
    engines.append(Generator(model, **options))
    running = engines[2].submit(PROMPTS[3], SAMPLING)
    engines[2].step()
    engines[0].cancel(left)
    assert model.rings.num_used == 1
    found = [event.token_id for event in engines[2].stream([running])]
    assert found == want[3]
    assert model.rings.num_used == 0


@pytest.mark.parametrize("name", ["Gemma2", "Mistral"])
def test_requests_without_rings_are_refused(name: str) -> None:
    """Callers of a PagedModel with rings say which requests begin; else their keys would be lost."""
    limits = Limits(max_num_reqs=2, max_num_tokens=24, max_blocks_per_req=24)
    model = PagedModel(make(name), num_blocks=60, block_size=4, limits=limits, sliding_step=12)
    ids, blocks = torch.tensor(PROMPTS[1][:12]), [7, 3, 9]
    batch = AttentionMetadata.from_lists([12], [12], [blocks], block_size=4, num_blocks=60)
    before = [tensor.clone() for tensor in model.kv_cache.tensors().values()]
    with torch.inference_mode():
        with pytest.raises(
            ArgumentError, match=r"blocks \[7\] and have none; call paged.rings.take\(block\)"
        ):
            model(ids, batch)
        assert all(map(torch.equal, before, model.kv_cache.tensors().values()))
        assert model.rings is not None
        model.rings.take(7)
        logits = model(ids, batch)
        model.model.set_attn_implementation("eager")
        want = model.model(ids[None], use_cache=False).logits[0]
        model.model.set_attn_implementation("torchpaged")
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
        model.rings.give(7)
        with pytest.raises(ArgumentError, match="rings.take"):
            model(ids, batch)
    for block in (3, 4):
        model.rings.take(block)
    for wrong, got in ((5, "one more, 5"), (3, "3, which has a ring")):
        with pytest.raises(ArgumentError, match=f"block: .*got {got}; call give"):
            model.rings.take(wrong)
    with pytest.raises(ArgumentError, match="block: expected the first block of a request that has a ring"):
        model.rings.give(7)


@pytest.mark.parametrize("step", ["12", 0, 2.5, True])
def test_a_sliding_step_is_a_number_of_tokens(step: Any) -> None:
    with pytest.raises(ArgumentError, match="sliding_step: expected None, or at least 1 token"):
        PagedModel(make("Mistral"), num_blocks=60, limits=Limits(2, 24, 24), sliding_step=step)
    with pytest.raises(ArgumentError, match="sliding_step: .*give limits=Limits"):
        PagedModel(make("Mistral"), num_blocks=60, sliding_step=12)


def test_a_paged_model_with_rings_is_asked() -> None:
    """Its rings take so many tokens in a step, and nothing that another request computed."""
    limits = Limits(max_num_reqs=3, max_num_tokens=64, max_blocks_per_req=24)
    model = PagedModel(make("Gemma2"), num_blocks=100, block_size=4, limits=limits, sliding_step=12)
    options: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 96}
    with pytest.raises(ArgumentError, match="share_prefixes: expected 'auto' or False.*rings"):
        Generator(model, **options, prefill_chunk_size=12, share_prefixes=True)
    generator = Generator(model, **options, prefill_chunk_size=64)
    queries: list[int] = []
    step = generator.model._cache.run  # type: ignore[attr-defined]

    def run(model: Any, input_ids: Any, metadata: Any, **more: Any) -> Any:
        queries.append(int(metadata.query_start_loc.diff().max()))
        return step(model, input_ids, metadata, **more)

    generator.model._cache.run = run  # type: ignore[attr-defined]
    plain = Generator(make("Gemma2"), **SIZES, rolling=False)
    got = [output.token_ids for output in generator.generate(PROMPTS, SAMPLING)]
    assert got == [output.token_ids for output in plain.generate(PROMPTS, SAMPLING)]
    assert max(queries) == 12


def test_memory_budgets_and_refusals() -> None:
    budget = 1 << 20
    for name in ("Mistral", "Gemma2"):
        cache = Generator(make(name), **SIZES, kv_cache_memory=budget).model.kv_cache
        assert cache.num_bytes <= budget
    with pytest.raises(ArgumentError, match="memory_budget: expected at least"):
        Generator(make("Gemma2"), **SIZES, kv_cache_memory=4096)
    with pytest.raises(ArgumentError, match="rolling: expected"):
        Generator(make("Gemma2"), **SIZES, rolling="no")
    with pytest.raises(ArgumentError, match="share_prefixes: expected.*rolling=False"):
        Generator(make("Gemma2"), **SIZES, rolling=True, share_prefixes=True, num_checkpoints=0)


def test_a_window_that_no_mask_has_is_refused() -> None:
    """Such a model's forwards see every token, and its caches drop them."""
    with pytest.raises(UnsupportedModelError, match=r"a window of \[8\] tokens.*no mask of a window"):
        Generator(tiny_model("Llama", **COMMON), **SIZES)


def test_requests_that_share_blocks_keep_all_tokens_or_copies_of_rings() -> None:
    """A prefix that another request computed is complete in every layer, or no request takes it."""
    prompts, sampling = (
        [PROMPTS[1], [*PROMPTS[1][:36], 7, 8]],
        SamplingParams(max_new_tokens=8, ignore_eos=True),
    )
    options: dict[str, Any] = {**SIZES, "prefill_chunk_size": 64}
    found = []
    for share, copies in ((True, 0), ("auto", 0), ("auto", 1)):
        generator = Generator(make("Gemma2"), **options, share_prefixes=share, num_checkpoints=copies)
        found.append([output.token_ids for output in generator.generate(prompts, sampling)])
        assert (generator.model.rings is None) is (share is True)
        assert generator.stats.shared_tokens == (36 if share is True or copies else 0)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("way", ["launches of 3", "one by one"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "Llama4Text"])
def test_copies_of_rings_are_hit(name: str, way: str) -> None:
    """Logits within what chunks change, over prefixes of several windows; NaN in all rings that are none of
    the copies."""
    prompts = [[*PROMPTS[3][:at], 7, 8, at] for at in (50, 50, 50, 27)]
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=0)
    options = SIZES | WAYS[way] | {"max_logprobs": 0}

    def logprobs(generator: Generator, prompts: Any) -> list[Any]:
        outputs = generator.generate(prompts, sampling)
        return [[next(iter(each.values())) for each in o.logprobs or []] for o in outputs]

    want = logprobs(Generator(make(name), **options, share_prefixes=False), prompts)
    generator = Generator(make(name), **options, rolling=True, prefix_cache=True, num_checkpoints=8)
    assert "8 checkpoints of requests' states or rings" in generator.prefix_cache_reason
    model, prefixes = generator.model, generator.prefix_cache
    for prompt, expected in zip(prompts, want, strict=True):
        rings = set(range(11)) - {3 + place for place in prefixes.checkpoints.values()}
        for tensor in model.rings._own:
            tensor[list(rings)] = float("nan")
        assert logprobs(generator, [prompt]) == [pytest.approx(expected, abs=1e-4)]
    assert prefixes.stats.hit_tokens == 0 + 48 + 52 + 24
    assert prefixes.stats.missed_tokens["no checkpoint"] == 4
