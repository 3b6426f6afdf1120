"""The prefix cache of an engine: tokens are those without it, whatever happens in between; what is known
outlives requests, and what may not be trusted does not."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_requests import tokens_of
from tiny_models import tiny_model

from torchpaged import ArgumentError, BlockPool
from torchpaged.cache import LRU, PrefixCache
from torchpaged.engine import Generator, SamplingParams
from torchpaged.engine.outputs import TextStream
from torchpaged.engine.scheduler import Scheduler
from torchpaged.engine.sequence import Sequence

SYSTEM = [3 + i * 7 % 90 for i in range(21)]
PROMPTS = [[*SYSTEM, 5, 6, 7], [*SYSTEM, 9], SYSTEM[:9], [*SYSTEM, 5, 6, 7, 8, 9], [40, *SYSTEM], SYSTEM]
TEN = SamplingParams(max_new_tokens=10, ignore_eos=True)
SIZES: dict[str, Any] = {"block_size": 4, "max_seq_len": 64}


def each(seed: int) -> list[SamplingParams]:
    """Greedy and drawn."""
    return [
        SamplingParams(max_new_tokens=6 + i, ignore_eos=True, temperature=0.9 * (i % 2), seed=seed + i)
        for i in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def alone(model: Any) -> dict[int, list[list[int]]]:
    generator = Generator(model, **SIZES, max_batch_size=1, graphs=False, prefix_cache=False)
    return {seed: tokens_of(generator.generate(PROMPTS, each(seed))) for seed in range(2)}


def missed(generator: Generator) -> dict[str, int]:
    return generator.stats.prefix_cache.missed_tokens


# ------------------------------------------------------------------------------------------ the same tokens
STEPS: dict[str, dict[str, Any]] = {
    "no graphs": {"graphs": False},
    "graphs": {"max_batch_size": 6},
    "launches of 3": {"steps_per_launch": 3},
    "apart": {"mixed_steps": False},
    "prefill graphs": {"prefill_buckets": [8, 16], "prefill_chunk_size": 16},
    "fused": {"fuse": True},
}


@pytest.mark.slow_cases(but_every=2)
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("chunk", [5, 16, 64])
@pytest.mark.parametrize("num_blocks", [None, 17], ids=["room", "preempted"])
def test_tokens_are_those_without_it(
    make_llama: Callable[..., Any],
    alone: dict[int, list[list[int]]],
    options: dict[str, Any],
    chunk: int,
    num_blocks: int | None,
) -> None:
    model = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    options = {"max_batch_size": 4, "prefill_chunk_size": chunk, **SIZES, **options}
    if chunk != 16 and "prefill_buckets" in options:
        options["prefill_buckets"] = [chunk]
        options["prefill_chunk_size"] = chunk
    generator = Generator(model, **options, num_blocks=num_blocks)
    for seed in (0, 1, 0):
        order = random.Random(seed).sample(range(len(PROMPTS)), len(PROMPTS))
        params = each(seed)
        outputs = generator.generate([PROMPTS[i] for i in order], [params[i] for i in order])
        assert tokens_of(outputs) == [alone[seed][i] for i in order]
        assert generator.pool.num_free == generator.pool.num_usable
        assert generator.prefix_cache is not None
        assert len(generator.prefix_cache) == len(generator.pool.idle)
    stats = generator.stats.prefix_cache
    assert stats.queried_tokens == stats.hit_tokens + sum(stats.missed_tokens.values())
    assert stats.hit_tokens > 2 * 60
    assert (stats.evicted_blocks > 0) is (num_blocks is not None)
    assert (generator.stats.preemptions > 0) is (num_blocks is not None)


def test_prompts_and_outputs_outlive_their_request(model: Any) -> None:
    """The next turn of a chat computes what is new alone."""
    generator, plain = (Generator(model, **SIZES, prefix_cache=on) for on in ("auto", False))
    (answer,) = generator.generate([SYSTEM], TEN)
    turn = [*SYSTEM, *answer.token_ids, 50, 51, 52]
    before = generator.stats.prefill_tokens
    (got,), (want,) = generator.generate([turn], TEN), plain.generate([turn], TEN)
    # Of 21 + 10 tokens all but the last have keys and values: 7 blocks of 4.
    assert generator.stats.prefill_tokens - before == len(turn) - 28
    assert got.token_ids == want.token_ids
    assert plain.stats.shared_tokens == 0
    assert len(plain.pool.idle) == 0


def test_the_last_token_is_always_computed(model: Any) -> None:
    generator = Generator(model, **SIZES)
    want = generator.generate([SYSTEM[:16]], TEN)[0].token_ids
    assert generator.generate([SYSTEM[:16]], TEN)[0].token_ids == want
    assert generator.stats.shared_tokens == 12
    assert missed(generator) == {"new": 12, "tail": 8}


def test_who_is_put_back_finds_its_own_blocks(model: Any) -> None:
    """Neither shares with the other."""
    prompts = [list(range(3, 15)), list(range(40, 52))]
    plain = Generator(model, **SIZES, prefix_cache=False)
    want = tokens_of(plain.generate(prompts, SamplingParams(max_new_tokens=16, ignore_eos=True)))
    generator = Generator(model, **SIZES, num_blocks=10, max_batch_size=2)
    got = generator.generate(prompts, SamplingParams(max_new_tokens=16, ignore_eos=True))
    assert tokens_of(got) == want
    assert generator.stats.preemptions > 0
    assert generator.stats.shared_tokens == 0, "of their own alone, which is no hit"
    assert generator.stats.prefix_cache.evicted_blocks > 0
    without = Generator(model, **SIZES, num_blocks=10, max_batch_size=2, prefix_cache=False)
    without.generate(prompts, SamplingParams(max_new_tokens=16, ignore_eos=True))
    assert generator.stats.prefill_tokens < without.stats.prefill_tokens


def test_cancelled_in_the_middle(model: Any) -> None:
    generator, plain = Generator(model, **SIZES, prefill_chunk_size=8), Generator(model, **SIZES)
    number = generator.submit(SYSTEM, TEN)
    generator.step()
    generator.cancel(number)
    assert len(generator.prefix_cache or ()) == 2, "the chunk that was launched"
    assert tokens_of(generator.generate(PROMPTS, TEN)) == tokens_of(plain.generate(PROMPTS, TEN))
    assert generator.stats.shared_tokens > 8


# ------------------------------------------------------------------------------------- what separates texts
def test_salts_separate_tenants(model: Any) -> None:
    generator = Generator(model, **SIZES, max_batch_size=4)
    salts = ("a", "b", None, "a")
    params = [SamplingParams(max_new_tokens=4, cache_salt=salt) for salt in salts]
    outputs = tokens_of(generator.generate([SYSTEM] * 4, params))
    assert outputs == outputs[:1] * 4
    assert generator.stats.shared_tokens == 20
    generator.generate([SYSTEM] * 2, [SamplingParams(cache_salt=salt) for salt in ("c", "b")])
    assert generator.stats.shared_tokens == 40


@pytest.mark.parametrize("salt", [1, b"a", True, ("a",)])
def test_wrong_salts_are_refused(salt: Any) -> None:
    with pytest.raises(ArgumentError, match="cache_salt: expected None or a string"):
        SamplingParams(cache_salt=salt)


@pytest.mark.parametrize("graphs", [True, False])
def test_weights_that_were_written_in_place(make_llama: Callable[..., Any], graphs: bool) -> None:
    """As an optimizer does, with requests before, in the middle and after."""
    model = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    generator = Generator(model, **SIZES, graphs=graphs)
    first = generator.generate([SYSTEM], TEN)[0].token_ids
    runs = generator.submit(SYSTEM, SamplingParams(max_new_tokens=30, ignore_eos=True))
    generator.step()
    generator.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    plain = Generator(model, **SIZES, graphs=False, prefix_cache=False)
    want = plain.generate([SYSTEM], TEN)[0].token_ids
    assert want != first
    ids = [generator.submit(SYSTEM, TEN)]
    got: dict[int, list[int | None]] = {}
    for event in generator.stream([*ids, runs]):
        got.setdefault(event.request_id, []).append(event.token_id)
    assert got[ids[0]] == want
    assert generator.generate([SYSTEM], TEN)[0].token_ids == want
    assert missed(generator)["the model changed"] == 20


def test_a_model_without_graphs_may_change_its_parts(make_llama: Callable[..., Any]) -> None:
    model = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    generator = Generator(model, **SIZES, graphs=False)
    first = generator.generate([SYSTEM], TEN)[0].token_ids
    norm = model.model.layers[0].input_layernorm
    norm.weight = torch.nn.Parameter(torch.linspace(-3, 3, 64))
    want = Generator(model, **SIZES, graphs=False).generate([SYSTEM], TEN)[0].token_ids
    assert want != first
    assert generator.generate([SYSTEM], TEN)[0].token_ids == want


def test_what_torch_does_not_count_is_told(make_llama: Callable[..., Any]) -> None:
    model = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    generator = Generator(model, **SIZES)
    generator.generate([SYSTEM], TEN)
    model.model.layers[0].mlp.down_proj.weight.data.mul_(-20)
    generator.reset_prefix_cache()
    want = Generator(model, **SIZES, graphs=False).generate([SYSTEM], TEN)[0].token_ids
    assert generator.generate([SYSTEM], TEN)[0].token_ids == want
    assert missed(generator)["reset_prefix_cache()"] == 20


def test_versions_count_writes() -> None:
    """Not public, and what `ModelState.num_writes` relies on."""
    weight = torch.nn.Parameter(torch.zeros(2))
    before = weight._version
    with torch.no_grad():
        weight.add_(1)
        weight.copy_(torch.ones(2))
    assert weight._version == before + 2


# ------------------------------------------------------------------------------------------ what goes wrong
class _Faulty:
    """A paged model whose next forward fails, or gives NaN."""

    def __init__(self, paged: Any) -> None:
        self._paged, self.fault = paged, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._paged, name)

    def __call__(self, *args: Any) -> Any:
        fault, self.fault = self.fault, ""
        logits = self._paged(*args)
        if fault == "raises":
            raise RuntimeError("broken")
        return logits.fill_(float("nan")) if fault == "nan" else logits


@pytest.fixture
def faulty(make_llama: Callable[..., Any]) -> Any:
    from torchpaged.hf import PagedModel

    llama = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    return _Faulty(PagedModel(llama, num_blocks=60, block_size=4))


def test_a_step_that_broke_off_publishes_nothing(faulty: Any) -> None:
    generator = Generator(faulty, max_seq_len=64, graphs=False)
    want = tokens_of(generator.generate(PROMPTS, TEN))
    faulty.fault = "raises"
    number = generator.submit([*SYSTEM, 11], TEN)
    generator.step()
    assert not faulty.fault
    assert len(generator.prefix_cache or ()) == 0
    generator.cancel(number)
    assert tokens_of(generator.generate(PROMPTS, TEN)) == want
    assert missed(generator)["a step broke off"] > 0


def test_what_a_failed_request_had_is_not_trusted(faulty: Any) -> None:
    generator = Generator(faulty, max_seq_len=64, graphs=False, max_batch_size=1)
    want = tokens_of(generator.generate(PROMPTS, TEN))
    faulty.fault = "nan"
    (bad,) = generator.generate([[*SYSTEM, 11]], TEN)
    assert bad.finish_reason == "error"
    before = generator.stats.shared_tokens
    assert tokens_of(generator.generate([SYSTEM], TEN)) == want[5:]
    assert generator.stats.shared_tokens == before
    assert missed(generator)["failed"] == 20
    assert generator.pool.num_free == generator.pool.num_usable


def test_another_engine_over_the_same_pools(faulty: Any) -> None:
    """What it wrote lies where the first one's blocks were."""
    first, second = (Generator(faulty, max_seq_len=64, graphs=graphs) for graphs in (True, False))
    prompts = [list(range(3, 24)), list(range(50, 71))]
    for prompt in prompts * 2:
        want = Generator(faulty._paged.model, **SIZES, prefix_cache=False).generate([prompt], TEN)
        for generator in (first, second, first, first):
            assert generator.generate([prompt], TEN)[0].token_ids == want[0].token_ids
    assert missed(first)["another Generator had the pools"] > 0
    assert first.stats.shared_tokens == 4 * 20, "asked twice in a row"
    assert second.stats.shared_tokens == 0


# ------------------------------------------------------------------------------------------------ decisions
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "until the pool needs the blocks"),
        ({"prefix_cache": True}, "until the pool needs the blocks"),
        ({"prefix_cache": False}, "switched off by prefix_cache=False"),
        ({"share_prefixes": False}, "switched off by share_prefixes=False"),
        ({"batch_invariant": True}, "a step's shapes would depend on what is known"),
    ],
    ids=str,
)
def test_why_blocks_are_kept_or_not(model: Any, options: dict[str, Any], reason: str) -> None:
    generator = Generator(model, **SIZES, **options)
    generator.generate(PROMPTS[:1], TEN)
    assert reason in generator.prefix_cache_reason
    assert (len(generator.pool.idle) > 0) is reason.startswith("until")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache": 1}, "prefix_cache: expected True, False or 'auto'"),
        ({"prefix_cache": True, "share_prefixes": False}, "prefix_cache: .* with share_prefixes=False"),
        ({"prefix_cache": True, "rolling": True, "num_checkpoints": 0}, "prefix_cache: .* with rolling=True"),
        ({"prefix_cache": True, "batch_invariant": True}, "prefix_cache: .* with batch_invariant=True"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Generator(model, **SIZES, **options)


def test_layers_with_a_window_say_why_they_keep_nothing() -> None:
    model = tiny_model("Gemma2", head_dim=16, sliding_window=8)
    options: dict[str, Any] = {**SIZES, "prefill_chunk_size": 8, "num_checkpoints": 0}
    found = []
    for asked in ("auto", True, False):
        generator = Generator(model, **options, prefix_cache=asked)
        found.append([tokens_of(generator.generate(PROMPTS[:2], TEN)) for _ in range(2)])
        assert (generator.model.rings is None) is (asked is True)
        assert ("rings of blocks" in generator.prefix_cache_reason) is (asked is not True)
        assert (generator.stats.shared_tokens > 40) is (asked is True)
    assert found[0] == found[1] == found[2]


def test_fp8_pools_keep_what_was_written_by_the_scales_of_the_first_prompt(model: Any) -> None:
    options: dict[str, Any] = {**SIZES, "kv_dtype": "fp8_e4m3"}
    plain, generator = Generator(model, **options, prefix_cache=False), Generator(model, **options)
    want = tokens_of(plain.generate(PROMPTS, TEN))
    for _ in range(2):
        assert tokens_of(generator.generate(PROMPTS, TEN)) == want
    assert generator.stats.shared_tokens > plain.stats.shared_tokens


# -------------------------------------------------------------------------------------- scheduler and books
def test_a_scheduler_takes_idle_blocks_as_no_free_ones() -> None:
    """A request whose prompt is known needs its blocks all the same: they are no others' then."""
    pool = BlockPool(9)
    scheduler = Scheduler(pool, 4, 4, 64, prefixes=PrefixCache(pool, 4))
    first = Sequence(0, list(range(12)), TEN, 0, TextStream(None, ()), 64)
    scheduler.add(first)
    assert scheduler.schedule().chunks == [(first, 12)]
    first.num_computed = 12
    scheduler.blocks.computed(first)
    scheduler.remove(first)
    assert (len(pool.idle), pool.num_free) == (3, 8)
    again = [Sequence(n, [*range(12), 50 + n, 60], TEN, 0, TextStream(None, ()), 64) for n in (1, 2)]
    other = Sequence(3, list(range(60, 80)), TEN, 0, TextStream(None, ()), 64)
    for sequence in (*again, other):
        scheduler.add(sequence)
    step = scheduler.schedule()
    assert step.chunks == [(again[0], 2), (again[1], 2)]
    assert again[0].blocks[:3] == again[1].blocks[:3]
    assert other in scheduler.waiting, "it would need 6 of 3"
    assert pool.num_free == 3


def test_requests_run_in_the_order_in_which_they_came() -> None:
    """Threads may come in with later ids first. Who is there before, and may have tokens in flight, is never
    put back for one that was let in after the caller was asked to read these."""
    pool = BlockPool(9)
    scheduler = Scheduler(pool, 4, 4, 64, ahead=1)
    early = Sequence(7, list(range(16)), TEN, 0, TextStream(None, ()), 26)
    scheduler.add(early)
    assert scheduler.schedule().chunks == [(early, 16)]
    early.num_computed, early.row = 19, 0
    early.tokens.extend([5] * 3)
    assert len(early.blocks) == 5
    # 1 token in flight: the next step may need one more block
    early.step_count = scheduler.steps
    early.step_count.started = early.step_count.most = 1
    assert not scheduler.short_of_blocks(scheduler.ask())
    late = Sequence(3, list(range(11)), TEN, 0, TextStream(None, ()), 20)
    scheduler.add(late)
    step = scheduler.schedule()
    assert step.put_back == [late]
    assert step.decodes == [early]


class _Books:
    """An engine without a model: what a step would write is written down by block, and what it reads must be
    there."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.size = self.r.choice([1, 2, 4])
        self.pool = BlockPool(self.r.choice([12, 24]))
        cache = PrefixCache(self.pool, self.size, keep=self.r.random() < 0.8)
        chunk, mixes = self.r.choice([1, 3, 16]), self.r.random() < 0.5
        self.most = max(chunk, -(-chunk // 2) + 4)  # tokens of a pass that is mixed
        self.mixes = mixes
        self.scheduler = Scheduler(self.pool, self.size, 4, chunk, prefixes=cache, mixes=mixes)
        self.memory: dict[tuple[int, int], Any] = {}  # by block and place
        self.live: list[Sequence] = []
        self.number = self.finished = 0

    def submit(self) -> None:
        room = min(30, self.pool.num_usable * self.size)
        prompt = [[1, 2], [1, 1], [2]][self.r.randrange(3)] * 4
        prompt = prompt[: self.r.randint(1, 8)] + self.r.choices(range(3), k=self.r.randint(0, 2))
        prompt = prompt[: room - 1]
        salt = self.r.choice([None, None, "a"])
        params = SamplingParams(cache_salt=salt)
        most = min(len(prompt) + self.r.randint(1, 12), room + 1)
        sequence = Sequence(self.number, prompt, params, 0, TextStream(None, ()), most)
        self.number += 1
        self.live.append(sequence)
        self.scheduler.add(sequence)

    def write(self, sequence: Sequence, first: int, end: int) -> None:
        for at in range(end):
            where = sequence.blocks[at // self.size], at % self.size
            what = sequence.sampling.cache_salt, tuple(sequence.tokens[: at + 1])
            if at < first:
                assert self.memory.get(where) == what, "a step reads what was never written for it"
            else:
                assert self.pool.ref_count(where[0]) == 1, "a step writes where others read"
                self.memory[where] = what

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if self.r.random() < 0.02 and (plan.chunks or plan.decodes):
            return self.reset()
        steps = [(s, 1) for s in plan.decodes] + plan.chunks
        if self.mixes:
            assert sum(count for _, count in steps) <= self.most
        for sequence, count in steps:
            self.write(sequence, sequence.num_computed, sequence.num_computed + count)
        for sequence, count in steps:
            sequence.num_computed += count
            self.scheduler.blocks.computed(sequence)
            if sequence.remaining == 0:
                sequence.tokens.append(sum(sequence.tokens) % 3)
                if len(sequence.tokens) >= sequence.max_len:
                    self.end(sequence, "length")

    def end(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        self.live.remove(sequence)
        self.scheduler.remove(sequence)
        self.finished += reason == "length"

    def reset(self) -> None:
        self.scheduler.blocks.forget_prefixes("a step broke off")
        if self.r.random() < 0.5:
            self.scheduler.reset(self.live)

    def check(self) -> None:
        holders = [0] * self.pool.num_blocks
        for sequence in self.live:
            for block in sequence.blocks:
                holders[block] += 1
        assert holders[1:] == [self.pool.ref_count(block) for block in range(1, self.pool.num_blocks)]
        assert len(self.pool._free) + len(self.pool.idle) == holders[1:].count(0)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_requests(seed: int) -> None:
    books = _Books(seed)
    for _ in range(500):
        if len(books.live) < 7 and books.r.random() < 0.5:
            books.submit()
        if books.live and books.r.random() < 0.05:
            books.end(books.r.choice(books.live), books.r.choice(["cancelled", "error"]))
        books.step()
        books.check()
    while books.live:
        books.step()
        books.check()
    assert books.finished > 20
    assert books.pool.num_free == books.pool.num_usable


# ---------------------------------------------------------------------------------------- policies and pins
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "not pinned"])
@pytest.mark.parametrize("options", [{}, {"graphs": False}], ids=["graphs", "no graphs"])
def test_what_is_pinned_outlives_a_flood(model: Any, pinned: bool, options: dict[str, Any]) -> None:
    """Requests that need more blocks than there are wait, or are put back, and their tokens are the same."""
    flood = [[40 + i, *range(3, 15)] for i in range(6)]
    want = tokens_of(Generator(model, **SIZES, prefix_cache=False).generate(flood, TEN))
    generator = Generator(model, **SIZES, **options, max_batch_size=4, num_blocks=18)
    generator.generate([SYSTEM], SamplingParams(max_new_tokens=1))
    if pinned:
        assert generator.pin(SYSTEM).num_tokens == 20
    assert tokens_of(generator.generate(flood, TEN)) == want
    assert generator.prefix_cache is not None
    known = generator.prefix_cache.text(SYSTEM).known()
    assert len(known) == (5 if pinned else 0)
    assert generator.pool.num_free == generator.pool.num_usable
    got = generator.generate([PROMPTS[0]], TEN)[0].token_ids
    assert got == Generator(model, **SIZES).generate([PROMPTS[0]], TEN)[0].token_ids


def test_a_request_that_could_not_run_at_all_takes_pinned_blocks(model: Any) -> None:
    generator = Generator(model, **SIZES, num_blocks=9, max_batch_size=2)
    generator.generate([SYSTEM], SamplingParams(max_new_tokens=1))
    pin = generator.pin(SYSTEM, ttl=3600, priority=2)
    long, short = [50, *SYSTEM], [60, 61, 62]
    outputs = generator.generate([long, short], TEN)
    plain = Generator(model, **SIZES, prefix_cache=False)
    assert tokens_of(outputs) == tokens_of(plain.generate([long, short], TEN))
    generator.unpin(pin)
    assert generator.pool.num_pinned == 0


def test_a_policy_given_to_an_engine(model: Any) -> None:
    class Newest(LRU):
        """The one left last goes first."""

        def evict(self) -> int:
            return self._order.popitem()[0]

    generator = Generator(model, **SIZES, num_blocks=12, eviction=Newest())
    for prompt in ([*range(3, 20)], [*range(40, 57)], [*range(60, 77)]):
        generator.generate([prompt], SamplingParams(max_new_tokens=2))
    assert generator.prefix_cache is not None
    known = [len(generator.prefix_cache.text(range(first, first + 17)).known()) for first in (3, 40)]
    assert known == [4, 0], "the first text; the beginning of the second was left last"
    with pytest.raises(
        ArgumentError, match="^eviction: expected None where nothing is kept, got .*switched off"
    ):
        Generator(model, **SIZES, prefix_cache=False, eviction=Newest())
    with pytest.raises(ArgumentError, match="^prefix_cache: expected one that keeps blocks"):
        Generator(model, **SIZES, prefix_cache=False).pin(SYSTEM)
