"""Hybrids' prefix hits, from copies of states: tokens as without, whatever happens to requests."""

from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of

from torchpaged import ArgumentError
from torchpaged.backends import Limits
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedModel

SIZES: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 96, "block_size": 4, "max_logprobs": 0}
SYSTEM = [(7 * i) % 90 + 5 for i in range(50)]
PROMPTS = [SYSTEM + [10 + 7 * i, 11, 12 + i][: i + 1] for i in range(3)]
GREEDY = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=0)


def make(name: str = "lfm2") -> Any:
    model = model_of(name).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():  # outputs depend on the layers, and not on the last token alone
        model.get_input_embeddings().weight.mul_(0.1)
    return model


def tokens(generator: Generator, prompts: Any = PROMPTS, sampling: SamplingParams = GREEDY) -> Any:
    """Tokens of each request, and how likely they were."""
    outputs = generator.generate(prompts, sampling)
    return [(o.token_ids, [next(iter(each.values())) for each in o.logprobs or []]) for o in outputs]


def off(name: str = "lfm2", prompts: Any = PROMPTS, sampling: SamplingParams = GREEDY) -> Any:
    found = tokens(Generator(make(name), **SIZES, share_prefixes=False), prompts, sampling)
    return [(ids, pytest.approx(logprobs, abs=1e-4)) for ids, logprobs in found]


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2"])
def test_texts_that_part_anywhere(name: str) -> None:
    """The second one of a text says where it ends what it shares; from the third one on that is hit. Why less
    was hit is said."""
    turns = [[[*SYSTEM[:at], 90, 91, at] for at in (33, 33, 33, 21)], PROMPTS]
    want = [off(name, turn) for turn in turns]
    generator = Generator(make(name), **SIZES, prefill_chunk_size=32)
    stats = generator.stats.prefix_cache
    for prompt, expected in zip(turns[0], want[0], strict=True):
        assert tokens(generator, [prompt]) == [expected]
    assert stats.hit_tokens == 0 + 32 + 32 + 0
    assert stats.missed_tokens["no checkpoint"] == 20
    assert tokens(generator, turns[1]) == want[1]
    assert stats.hit_tokens == 64 + 32 + 48 + 48  # the last two waited for the first one
    assert stats.queried_tokens == stats.hit_tokens + sum(stats.missed_tokens.values())


def test_samples_of_a_prompt_compute_it_once() -> None:
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=0, temperature=0.9, seed=3, n=4)
    generator = Generator(make(), **SIZES)
    assert tokens(generator, PROMPTS[2:], sampling) == off("lfm2", PROMPTS[2:], sampling)
    assert generator.stats.prefix_cache.hit_tokens == 3 * 52
    assert generator.stats.prefill_tokens == 52  # their last token decodes


def test_salts_keep_texts_apart() -> None:
    generator = Generator(make(), **SIZES, checkpoint_every=8)
    for salt, hits in (("a", 0), ("b", 0), ("a", 48)):
        before = generator.stats.shared_tokens
        sampling = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=0, cache_salt=salt)
        assert tokens(generator, PROMPTS[:1], sampling) == off()[:1]
        assert generator.stats.shared_tokens - before == hits


@pytest.mark.parametrize("cancelled", [0, 1])
def test_who_waited_for_a_request_that_is_cancelled_goes_on(cancelled: int) -> None:
    generator = Generator(make(), **SIZES, prefill_chunk_size=8)
    requests = [generator.submit(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(2):
        generator.step()
    generator.cancel(requests[cancelled])
    found: dict[int, list[float]] = {request: [] for request in requests}
    for event in generator.stream():
        if event.logprobs is not None:
            found[event.request_id] += event.logprobs.values()
    want = [logprobs for _, logprobs in off()]
    want[cancelled] = []
    assert list(found.values()) == want
    assert generator.model.rings.num_used == generator.pool.num_used == 0


def test_nothing_is_resumed_behind_a_step_that_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor behind a change of weights."""
    generator = Generator(make(), **SIZES, graphs=False)
    stats, want = generator.stats.prefix_cache, off()
    assert tokens(generator) == want
    hits = stats.hit_tokens
    with monkeypatch.context() as patch:
        patch.setattr(generator._stepper._packed, "prefill", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generator.generate(PROMPTS[:1], GREEDY)
    assert not generator.prefix_cache.checkpoints
    assert tokens(generator, PROMPTS[:1]) == want[:1]
    model = generator.model.model
    before = dict(stats.missed_tokens)
    model.get_input_embeddings().weight.data.mul_(-1)
    model.lm_head.weight.detach().mul_(1)  # counted as written
    assert tokens(generator, PROMPTS[:1]) != want[:1]
    assert stats.missed_tokens.keys() - before.keys() == {"the model changed"}
    assert stats.hit_tokens > hits


def test_engines_in_turns_over_one_paged_model() -> None:
    """Each forgets its checkpoints, which lie in the same slots."""
    limits = Limits(max_num_reqs=4, max_num_tokens=64, max_blocks_per_req=24)
    model = PagedModel(make("bamba"), num_blocks=97, block_size=4, limits=limits, num_checkpoints=3)
    options: dict[str, Any] = {
        "max_batch_size": 4,
        "max_seq_len": 96,
        "prefill_chunk_size": 32,
        "max_logprobs": 0,
    }
    with pytest.raises(ArgumentError, match="^num_checkpoints: expected nothing with a PagedModel"):
        Generator(model, **options, num_checkpoints=4)
    engines, want = [Generator(model, **options), Generator(model, **options, graphs=False)], off("bamba")
    for engine in (*engines, *engines):
        assert tokens(engine) == want
    assert all(engine.stats.prefix_cache.hit_tokens for engine in engines)
    reasons = engines[0].stats.prefix_cache.missed_tokens
    assert reasons["another Generator had the pools"]


def test_a_prefix_hit_leaves_what_is_shared_as_it_was() -> None:
    """Requests that run at once from one checkpoint, decoding over the border of its block."""
    generator = Generator(make("qwen3_next"), **SIZES, steps_per_launch=3)
    prompts = [SYSTEM, SYSTEM[:49], SYSTEM, SYSTEM]
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True, logprobs=0)
    want = off("qwen3_next", prompts, sampling)
    for _ in range(3):
        assert tokens(generator, prompts, sampling) == want
    assert generator.stats.prefix_cache.hit_tokens == 11 * 48


def test_how_many_checkpoints_there_are() -> None:
    """As many as requests; of a budget no more than an eighth; as many as were said; none in other models."""
    for name, options, want in (
        ("lfm2", {}, 4),
        ("lfm2", {"max_batch_size": 80}, 64),
        ("qwen3_next", {"kv_cache_memory": 1 << 18}, 1),
        ("qwen3_next", {"kv_cache_memory": 1 << 18, "num_checkpoints": 7}, 7),
        ("lfm2", {"share_prefixes": False}, 0),
        ("lfm2", {"batch_invariant": True}, 0),
    ):
        generator = Generator(make(name), **SIZES | options)
        rings, cache = generator.model.rings, generator.model.kv_cache
        assert rings.num_checkpoints == want
        assert rings.num_checkpoints * rings.bytes_per_request <= cache.num_bytes
        if "kv_cache_memory" in options:
            assert cache.num_bytes <= options["kv_cache_memory"]
    assert Generator(make("llama"), **SIZES).model.rings is None
