"""An engine whose pool is too small: what happens to requests that are put back changes seconds, not tokens;
nor does a link to the host that is late, a request that is cancelled meanwhile, or a step that breaks off."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_requests import tokens_of

from torchpaged import ArgumentError
from torchpaged.cache.host_blocks import HostBlocks
from torchpaged.engine import Generator, SamplingParams
from torchpaged.engine.outputs import TextStream
from torchpaged.engine.sequence import Sequence

DRAW = random.Random(3)
PROMPTS = [[DRAW.randrange(3, 99) for _ in range(DRAW.randint(3, 30))] for _ in range(10)]
PARAMS = [
    SamplingParams(max_new_tokens=8 + i, ignore_eos=True, temperature=0.9 * (i % 2), seed=i)
    for i in range(len(PROMPTS))
]
SIZES: dict[str, Any] = {"block_size": 4, "max_seq_len": 64}
SMALL: dict[str, Any] = {**SIZES, "num_blocks": 19, "max_batch_size": 6, "host_cache_memory": 2**20}


@pytest.fixture(scope="module")
def alone(model: Any) -> list[list[int]]:
    generator = Generator(model, **SIZES, max_batch_size=1, graphs=False, prefix_cache=False)
    return tokens_of(generator.generate(PROMPTS, PARAMS))


class LateHost(HostBlocks):
    """Copies from the host happen when they have to: asked a third time whether they are there, waited for,
    or before a slot is filled anew. What reads or gives away blocks before that is found out."""

    def __init__(self, cache: Any, memory_budget: int) -> None:
        self.pending: list[LateArrival] = []
        self.waits = 0
        super().__init__(cache, memory_budget)

    def swap_in(self, slots: Any, blocks: Any) -> Any:
        for pool in self._pools:
            pool[list(blocks)] = 0x7F
        arrival = LateArrival(self, lambda: super(LateHost, self).swap_in(slots, blocks))
        self.pending.append(arrival)
        return arrival

    def wait_for_arrivals(self) -> None:
        for arrival in list(self.pending):
            arrival.end()

    settle = wait_for_arrivals


class LateArrival:
    def __init__(self, host: LateHost, copy: Callable[[], Any]) -> None:
        self.host, self.copy, self.asked = host, copy, 0

    def end(self) -> None:
        if self in self.host.pending:
            self.host.pending.remove(self)
            self.copy()

    def ready(self) -> bool:
        self.asked += 1
        if self.asked > 2:
            self.end()
        return self not in self.host.pending

    def leave(self) -> None:
        self.wait()

    def wait(self) -> None:
        self.host.waits += self in self.host.pending
        self.end()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchpaged.engine.kept_prefixes.HostBlocks", LateHost)


STEPS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "no graphs": {"graphs": False},
    "launches of 3": {"steps_per_launch": 3},
    "apart, small chunks": {"mixed_steps": False, "prefill_chunk_size": 8},
    "a tiny host": {"host_cache_memory": 6 * 4 * 2 * 2 * 2 * 16 * 4},
}


@pytest.mark.slow_cases(but_every=2)
@pytest.mark.parametrize("link", ["at once", "late"])
@pytest.mark.parametrize("policy", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_tokens_are_the_same_whichever_way(
    model: Any,
    alone: list[list[int]],
    request: pytest.FixtureRequest,
    policy: str,
    options: dict[str, Any],
    link: str,
) -> None:
    if link == "late":
        request.getfixturevalue("late")
    generator = Generator(model, **SMALL | {"preemption": policy} | options)
    assert generator.prefix_cache is not None
    host = generator.prefix_cache.host
    assert host is not None
    for seed in range(2):
        order = random.Random(seed).sample(range(len(PROMPTS)), len(PROMPTS))
        outputs = generator.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
        assert tokens_of(outputs) == [alone[i] for i in order]
        assert generator.pool.num_free == generator.pool.num_usable
    stats = generator.stats
    assert stats.preemptions > 2
    assert stats.swapped == {"swap": stats.preemptions, "recompute": 0}.get(policy, stats.swapped)
    if policy == "swap":
        assert host.loaded_blocks > 0
    assert not getattr(host.blocks, "pending", None)
    found = stats.prefix_cache
    assert found.queried_tokens == found.hit_tokens + sum(found.missed_tokens.values())


def test_what_is_on_its_way_to_a_request_that_ends_in_a_reset_is_waited_for(model: Any, late: None) -> None:
    class Broken:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            raise KeyError

    generator = Generator(model, **SMALL, preemption="swap")
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        generator.submit(prompt, params)
    arriving: list[Sequence] = []
    while not arriving:
        generator.step()
        arriving = [s for s in generator.scheduler.running if s.arrival is not None and s.num_output]
    arriving[0].stream = TextStream(Broken())
    generator._stepper._is_at_work = True
    generator._stepper.reset()
    assert (arriving[0].finish_reason, arriving[0].arrival) == ("error", None)
    while generator.has_unfinished:
        generator.step()
    assert generator.pool.num_free == generator.pool.num_usable


def test_swap_is_for_requests_that_were_put_back_alone(model: Any, alone: list[list[int]]) -> None:
    """Where nothing is faster than to compute, their blocks come back all the same; others compute."""
    generator = Generator(model, **SMALL, preemption="swap")
    assert generator.prefix_cache is not None
    host = generator.prefix_cache.host
    assert host is not None
    host.recompute_seconds = lambda: 0.0
    assert tokens_of(generator.generate(PROMPTS, PARAMS)) == alone
    loaded, swapped = host.loaded_blocks, generator.stats.swapped
    assert swapped > 0
    assert loaded > 0
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        generator.generate([prompt], params)
    assert (host.loaded_blocks, generator.stats.swapped) == (loaded, swapped)


def test_fewer_tokens_are_computed_again(model: Any) -> None:
    computed = {}
    for policy in ("swap", "recompute"):
        generator = Generator(model, **SMALL, preemption=policy)
        generator.generate(PROMPTS, PARAMS)
        computed[policy] = generator.stats.prefill_tokens
    assert computed["swap"] < computed["recompute"]


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_pools_and_their_scales(model: Any, kv_dtype: str) -> None:
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 8]
    plain = Generator(model, **SIZES, kv_dtype=kv_dtype, prefix_cache=False)
    want = tokens_of(plain.generate(prompts, PARAMS[0]))
    scales = plain.model.kv_scales  # type: ignore[attr-defined]
    generator = Generator(model, **SMALL, kv_dtype=kv_dtype, kv_scales=scales, preemption="swap")
    for _ in range(2):
        assert tokens_of(generator.generate(prompts, PARAMS[0])) == want
    assert generator.stats.prefix_cache.host_tokens > 0


def test_a_conversation_comes_back_from_the_host(model: Any, late: None) -> None:
    """Others have needed its blocks since; a request that waits lets others run."""
    generator = Generator(model, **SMALL)
    assert generator.prefix_cache is not None
    assert generator.prefix_cache.host is not None
    generator.prefix_cache.host.recompute_seconds = None  # the host is always faster
    (first,) = generator.generate([PROMPTS[0]], [PARAMS[0]])
    generator.generate(PROMPTS[1:], PARAMS[1:])
    before = generator.stats.prefix_cache.host_tokens
    turn = PROMPTS[0] + first.token_ids + [5, 6, 7]
    other = [50, 51, 52]
    got = tokens_of(generator.generate([turn, other], PARAMS[1]))
    plain = Generator(model, **SIZES, prefix_cache=False)
    assert got == tokens_of(plain.generate([turn, other], PARAMS[1]))
    assert generator.stats.prefix_cache.host_tokens > before


@pytest.mark.parametrize("how", ["cancelled", "broken off", "closed", "weights"])
def test_what_ends_while_blocks_are_on_their_way(
    model: Any, late: None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator(model, **SMALL, graphs=False)
    generator.generate(PROMPTS, PARAMS)
    assert generator.prefix_cache is not None
    assert generator.prefix_cache.host is not None
    generator.prefix_cache.host.recompute_seconds = None  # the host is always faster
    host: Any = generator.prefix_cache.host.blocks
    running = generator.submit([60, 61], SamplingParams(max_new_tokens=30, ignore_eos=True))
    generator.step()
    for prompt in PROMPTS:
        request = generator.submit([*prompt, 5], PARAMS[0])
        generator.step()
        if host.pending:
            break
    assert host.pending
    if how == "closed":
        generator.close()
        return
    if how == "cancelled":
        generator.cancel(request)
        assert not host.pending, "its blocks are others' now"
    if how == "weights":
        with torch.no_grad():
            model.lm_head.weight.mul_(1.0)
        generator.submit([70], PARAMS[0])
        assert len(generator.prefix_cache.host) == 0
    if how == "broken off":
        with monkeypatch.context() as patched:
            patched.setattr(generator._stepper._packed, "decode", lambda *_: 1 / 0)
            patched.setattr(generator._stepper._packed, "prefill", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                while generator.has_unfinished:
                    generator.step()
    list(generator.stream())
    generator.cancel(running)
    want = Generator(model, **SIZES, prefix_cache=False).generate([[*prompt, 5]], PARAMS[0])
    assert tokens_of(generator.generate([[*prompt, 5]], PARAMS[0])) == tokens_of(want)
    assert generator.pool.num_free == generator.pool.num_usable


def test_what_is_refused(model: Any) -> None:
    for options, match in (
        ({"preemption": "later"}, "^preemption: expected 'auto' or 'recompute' or 'swap', got 'later'"),
        ({"preemption": "swap"}, "^preemption: expected 'auto' or 'recompute' without host_cache_memory"),
        ({"host_cache_memory": 0}, "^host_cache_memory: expected at least 1"),
        ({"host_cache_memory": 100}, "^host_cache_memory: expected at least [0-9]* bytes"),
        ({"host_cache_memory": 2**20, "prefix_cache": False}, "^host_cache_memory: expected None here"),
    ):
        with pytest.raises(ArgumentError, match=match):
            Generator(model, **SIZES, **options)  # type: ignore[arg-type]
