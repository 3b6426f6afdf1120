"""Mixed steps: decodes and chunks of prompts in one pass over the weights. The tokens of steps apart, and the
passes of the mixed schedule."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from engine_requests import SIZES, drawn
from model_coverage.architectures import model_of

from torchpaged import ArgumentError
from torchpaged.backends import Limits
from torchpaged.engine import Generator, SamplingParams, chunk_budget
from torchpaged.engine.chunk_budget import LEAST, ChunkBudget, least_padded
from torchpaged.graphs import TapeCapture


@pytest.fixture(scope="module")
def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of one token to several chunks, two with a common beginning."""
    prompts, params = drawn(14, (1, 2, 5, 13, 40), seed=4)
    prompts[5] = [*prompts[4], *range(20, 40)]
    return prompts, params


@pytest.fixture(scope="module")
def want(model: Any, requests: Any) -> list[tuple[list[int], str]]:
    return outcomes(Generator(model, **SIZES, graphs=False, mixed_steps=False), requests)


def outcomes(generator: Generator, requests: Any) -> list[tuple[list[int], str]]:
    found = [(o.token_ids, o.finish_reason) for o in generator.generate(*requests)]
    assert generator.pool.num_free == generator.pool.num_usable
    return found


WAYS: dict[str, dict[str, Any]] = {
    "launched": {},
    "captured": {"prefill_buckets": [8, 16], "buckets": [2, 4]},
    "launches of 3": {"steps_per_launch": 3},
    "on a tape": {
        "capture": TapeCapture(),
        "backend": "reference",
        "buckets": [2, 4],
        "prefill_buckets": [16],
    },
    "one by one": {"graphs": False},
    "short of blocks": {"num_blocks": 22, "lookahead": 8},
    "short of blocks, one by one": {"num_blocks": 22, "graphs": False},
    "many rows": {"max_batch_size": 12, "prefill_buckets": [16]},
    "fused": {"fuse": True, "prefill_buckets": [16]},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_steps_apart(
    way: str, make_llama: Callable[..., Any], model: Any, requests: Any, want: Any
) -> None:
    options = WAYS[way]
    generator = Generator(model, **{**SIZES, **options})
    assert outcomes(generator, requests) == want
    stats = generator.stats
    assert stats.mixed_steps > 5
    assert bool(stats.preemptions) == ("num_blocks" in options)
    if generator.prefill_runners:
        assert sum(report.hits for report in generator.prefill_runners[-1].report()) >= stats.mixed_steps
    if "fuse" in options:
        from torchpaged.hf import unfuse

        unfuse(model)


@pytest.fixture()
def counted(model: Any) -> Any:
    """A paged model; ``passes``: the query lengths of each forward."""
    from torchpaged.hf import PagedModel

    class Counted(PagedModel):
        passes: list[list[int]]

        def __call__(self, input_ids: Any, metadata: Any, logits_indices: Any = None) -> Any:
            live = metadata.query_start_loc.diff()
            self.passes.append(live[(live > 0) & (metadata.seq_lens > 0)].tolist())
            return super().__call__(input_ids, metadata, logits_indices)

    counted = Counted(model, num_blocks=97, block_size=4)
    counted.passes = []
    return counted


@pytest.mark.parametrize("options", [{}, {"graphs": False}], ids=["loop", "one by one"])
@pytest.mark.parametrize("mixes", [True, False])
def test_passes_over_the_weights(counted: Any, mixes: bool, options: dict[str, Any]) -> None:
    """Two requests decode while three prompts of 20 tokens come. Mixed, a pass has 16 tokens, one of each row
    first, until the prompts are computed: the request whose prompt has ended is a row of the next pass."""
    sizes = {name: size for name, size in SIZES.items() if name != "block_size"} | {"max_batch_size": 5}
    generator = Generator(counted, **sizes, **options, mixed_steps=mixes)
    forever = SamplingParams(max_new_tokens=60, ignore_eos=True)
    first = [generator.submit([8 + i], forever) for i in range(2)]
    for _ in range(3):
        generator.step()
    counted.passes.clear()
    stats = generator.stats
    before, mixed_before = stats.passes, stats.mixed_steps
    late = [generator.submit([20 + 20 * i + j for j in range(20)], forever) for i in range(3)]
    events, chunks = [], 0
    while not chunks or any(generator._requests[request].remaining > 1 for request in late):
        events += generator.step()
        chunks += 1
    passes = [lens for lens in counted.passes if lens]  # without warm-ups, which are padding
    assert stats.passes - before == len(passes)
    if mixes:
        assert passes == [[1, 1, 14], [1, 1, 6, 8], [1, 1, 1, 12, 1], [1, 1, 1, 1, 12], [1, 1, 1, 1, 7]]
        assert stats.mixed_steps - mixed_before == chunks == 5
    else:
        assert [sum(lens) for lens in passes if max(lens) > 1] == [16, 16, 16, 12]
        assert len(passes) == 2 * chunks == 8
        assert stats.mixed_steps == 0
    for request in first:  # tokens are read a step later where there are launches
        assert len([event for event in events if event.request_id == request]) == chunks


@pytest.mark.parametrize("options", [{}, {"graphs": False}], ids=["loop", "one by one"])
def test_a_mixed_pass_that_raises_loses_no_token(
    counted: Any, requests: Any, want: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its forward, or behind it where tokens are drawn: rows are lost, and computed again."""
    sizes = {name: size for name, size in SIZES.items() if name != "block_size"}
    generator = Generator(counted, **sizes, **options)
    raised, seen = [0, 0], {generator.submit(*request): [] for request in zip(*requests, strict=True)}
    packed, loop = generator._stepper._packed, generator.loop
    behind: Any = packed if loop is None else loop
    name = "sample" if loop is None else "finish_packed"

    def every_third_fails(which: int, call: Callable[..., Any], mixed: Callable[..., bool]) -> Any:
        def failing(*given: Any) -> Any:
            raised[which] += mixed(*given)
            result = call(*given)
            if mixed(*given) and raised[which] % 3 == 0:
                raise MemoryError
            return result

        return failing

    of_chunks = every_third_fails(0, packed.prefill, lambda chunks, decodes=(): bool(decodes))
    of_tokens = every_third_fails(1, getattr(behind, name), lambda *given: raised[0] % 2 == 1)
    monkeypatch.setattr(packed, "prefill", of_chunks)
    monkeypatch.setattr(behind, name, of_tokens)
    while generator.has_unfinished:
        try:
            for event in generator.step():
                seen[event.request_id].append(event.token_id)
        except MemoryError:
            continue
    assert min(raised) > 3
    assert list(seen.values()) == [tokens for tokens, _ in want]


@pytest.mark.parametrize("steps", [1, 3])
def test_requests_that_are_cancelled_in_the_middle(model: Any, requests: Any, want: Any, steps: int) -> None:
    """While their prompt is computed, with a mixed pass in flight, and while they decode: the others' tokens
    stay."""
    generator, rng = Generator(model, **SIZES, steps_per_launch=steps), random.Random(steps)
    seen: dict[int, list[int | None]] = {
        generator.submit(*request): [] for request in zip(*requests, strict=True)
    }
    ended: set[int] = set()
    while generator.has_unfinished:
        if rng.random() < 0.3 and len(ended) < 5 and generator.scheduler.running:
            victim = rng.choice(list(generator.scheduler.running)).request_id
            generator.cancel(victim)
            ended.add(victim)
        for event in generator.step():
            seen[event.request_id] += [] if event.token_id is None else [event.token_id]
    assert len(ended) > 3
    assert generator.pool.num_free == generator.pool.num_usable
    for request, (tokens, _) in enumerate(want):
        assert seen[request] == (tokens[: len(seen[request])] if request in ended else tokens)


def test_one_prompt_alone_gets_its_first_token_in_the_first_step(model: Any) -> None:
    """No row decodes beside it, so its first launch follows at once."""
    generator = Generator(model, **SIZES)
    generator.submit([8, 9, 10])
    assert len(generator.step()) == 1
    assert generator.stats.mixed_steps == 0


@pytest.mark.parametrize(
    ("decodes", "tokens", "taken"),
    [
        (250, 400, 262),  # 650 of 768: 118 would be padding, 138 are put off
        (508, 600, 516),  # 1,108 of 2,048
        (508, 100, 100),  # 4 and 96: a prompt would take long to its end
        (250, 774, 774),  # a bucket as it is
        (0, 1800, 1024),  # nothing decodes
        (100, 300, 300),  # 400 of 512 take no longer than 384
        (100, 3000, 3000),  # launched from Python
    ],
)
def test_what_would_be_padding_is_left_to_the_next_step(decodes: int, tokens: int, taken: int) -> None:
    assert least_padded([256, 384, 512, 768, 1024, 2048], decodes, tokens) == taken


def test_a_step_fills_its_graph(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests decode, 18 tokens come: 20 of a graph for 32, so that 14 are computed at once."""
    monkeypatch.setattr(chunk_budget, "LEAST_FILLED", 8)
    options = {**SIZES, "prefill_chunk_size": 32}
    prompts = [[8], [9], list(range(20, 38))]
    generator = Generator(model, **options, prefill_buckets=[8, 16, 32])
    forever = SamplingParams(max_new_tokens=40, ignore_eos=True)
    found: dict[int, list[int | None]] = {generator.submit(ids, forever): [] for ids in prompts[:2]}
    for _ in range(3):
        for event in generator.step():
            found[event.request_id].append(event.token_id)
    found[late := generator.submit(prompts[2], forever)] = []
    left = []
    while generator.has_unfinished:
        for event in generator.step():
            found[event.request_id].append(event.token_id)
        left.append(generator._requests[late].remaining if late in generator._requests else 0)
    assert left[:2] == [4, 0]
    assert [report.padded_rows for report in generator.prefill_runners[-1].report()][1:] == [0, 0]
    want = Generator(model, **SIZES, graphs=False).generate(prompts, forever)
    assert list(found.values()) == [output.token_ids for output in want]


def prompt_tokens(generator: Generator) -> list[int]:
    """Of each step to come."""
    taken, schedule = list[int](), generator.scheduler.schedule

    def seen(*asked: Any) -> Any:
        step = schedule(*asked)
        taken.append(sum(count for _, count in step.chunks))
        return step

    generator.scheduler.schedule = seen  # type: ignore[method-assign]
    return taken


@pytest.mark.parametrize(
    ("requests", "first"),
    [
        ([(40, 5)], 32),
        ([(40, 5), (40, 1)], 32),
        ([(12, 1), (12, 1), (12, 1)], 32),
        ([(6, 1), (12, 5), (12, 1)], 18),
        ([(6, 5), (12, 1), (12, 1)], 8),  # the first decodes behind its 6
    ],
)
def test_a_step_in_which_nothing_decodes(model: Any, requests: list[tuple[int, int]], first: int) -> None:
    """It is as long as the largest graph where no second token comes later for it."""
    prompts = [[8 + n, *range(9, 8 + tokens)] for n, (tokens, _) in enumerate(requests)]
    params = [SamplingParams(max_new_tokens=new, ignore_eos=True) for _, new in requests]
    generator = Generator(model, **{**SIZES, "prefill_chunk_size": 8}, prefill_buckets=[8, 16, 32])
    taken = prompt_tokens(generator)
    found = [output.token_ids for output in generator.generate(prompts, params)]
    assert taken[0] == first and sum(taken) == sum(tokens for tokens, _ in requests)
    want = Generator(model, **SIZES, graphs=False).generate(prompts, params)
    assert found == [output.token_ids for output in want]


@pytest.mark.parametrize(("name", "most"), [("lfm2", 8), ("mistral", 8), ("llama", 32)])
def test_what_a_prompt_can_not_take_of_a_step_is_no_one_elses(name: str, most: int) -> None:
    """A checkpoint of its state, or its ring, ends the oldest prompt's chunk: younger ones would delay the
    rest of it."""
    generator = Generator(model_of(name), **{**SIZES, "prefill_chunk_size": 8}, prefill_buckets=[8, 16, 32])
    taken = prompt_tokens(generator)
    generator.generate([[first, *range(9, 48)] for first in (5, 6, 7)], SamplingParams(max_new_tokens=2))
    assert taken[0] == most


def test_what_was_decided_and_why(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchpaged.hf import PagedModel

    said = Generator(model, **SIZES).mixed_reason
    assert said == "automatic: decodes and prompts read the weights once"
    assert Generator(model, **SIZES, mixed_steps=False).mixed_reason == "switched off by mixed_steps=False"
    invariant = {**SIZES, "backend": "reference", "batch_invariant": True}
    assert "decode steps are of one size" in Generator(model, **invariant).mixed_reason
    with pytest.raises(ArgumentError, match="mixed_steps: expected 'auto' or False, got True.*of one size"):
        Generator(model, **invariant, mixed_steps=True)
    sizes = {name: size for name, size in SIZES.items() if name != "block_size"}
    for most, mixes in ((16, True), (9, False)):
        paged = PagedModel(model, num_blocks=97, block_size=4, limits=Limits(max_num_tokens=most))
        generator = Generator(paged, **{**sizes, "prefill_chunk_size": 9, "max_batch_size": 5})
        assert (generator._decided.mixes, "takes 9 tokens, a step may have 10" in generator.mixed_reason) == (
            mixes,
            not mixes,
        )


@pytest.mark.parametrize(("fixed", "per_token"), [(0.004, 2e-5), (0.0, 1e-4), (0.03, 1e-6)])
def test_a_budget_comes_to_its_bound_from_below(fixed: float, per_token: float) -> None:
    budget, took = ChunkBudget(0.05, 4096), []
    for _ in range(40):
        took.append(fixed + per_token * budget.tokens)
        budget.note(budget.tokens, took[-1])
    assert max(took) <= 0.05
    assert budget.tokens == 4096 or took[-1] > 0.045
    budget.note(10, fixed + 10 * per_token)  # a last chunk of few tokens says little
    assert budget.tokens == 4096 or took[-1] > 0.045


def test_a_budget_is_cut_and_grows_back() -> None:
    budget = ChunkBudget(0.05, 4096)
    for _ in range(20):
        budget.note(budget.tokens, 0.002 + 2e-5 * budget.tokens)
    before = budget.tokens
    budget.note(budget.tokens, 3.0)  # a kernel was compiled
    assert budget.tokens == LEAST
    for _ in range(20):
        budget.note(budget.tokens, 0.002 + 2e-5 * budget.tokens)
    assert budget.tokens == before
    for _ in range(20):  # texts that are three times as long
        budget.note(budget.tokens, 0.002 + 6e-5 * budget.tokens)
    assert 0.002 + 6e-5 * budget.tokens <= 0.05
    for _ in range(20):  # a bound that can't be kept
        budget.note(budget.tokens, 0.06)
    assert budget.tokens == LEAST
    assert ChunkBudget(0.05, 16).tokens == 16


@pytest.mark.parametrize(
    "options",
    [{"capture_ahead": True}, {"graphs": False}, {"capture_ahead": True, "mixed_steps": False}],
    ids=str,
)
def test_decodes_wait_no_longer_than_asked(
    counted: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that each token of a forward moves on by a millisecond. Alone a prompt has whole chunks."""
    now, call = [0.0], type(counted).__call__

    def timed(self: Any, input_ids: Any, *given: Any) -> Any:
        now[0] += 1e-3 * input_ids.numel()
        return call(self, input_ids, *given)

    monkeypatch.setattr(type(counted), "__call__", timed)
    sizes = {"max_batch_size": 4, "max_seq_len": 96, "prefill_chunk_size": 24, "compile": False, **options}
    monkeypatch.setattr("torchpaged.engine.chunk_budget.LEAST", 2)
    prompts, params = [list(range(first, 90)) for first in (40, 50, 45)], SamplingParams(max_new_tokens=40)
    want = [output.token_ids for output in Generator(counted, **sizes).generate(prompts, params)]
    monkeypatch.setattr("torchpaged.engine.stepper.time.perf_counter", lambda: now[0])
    generator = Generator(counted, **sizes, max_decode_wait=0.012)
    requests, waits = [], []
    for prompt in prompts:
        requests.append(generator.submit(prompt, params))
        for _ in range(4):
            counted.passes.clear()
            before = now[0]
            generator.step()
            if any(1 in lens for lens in counted.passes):
                waits.append(now[0] - before)
    outputs = {r: [e.token_id for e in generator._requests[r].log] for r in requests}
    assert list(outputs.values()) == [t[: len(outputs[r])] for r, t in zip(requests, want, strict=True)]
    assert len(waits) > 5
    assert max(waits) <= 0.013 + 1e-9  # a row more may decode than in the steps seen before
    assert max(waits) > 0.008  # and not as if nothing were allowed


@pytest.mark.parametrize("wait", [0, -1.0, "50 ms", True, float("inf"), float("nan")], ids=repr)
def test_a_wait_is_a_number_of_seconds(model: Any, wait: Any) -> None:
    with pytest.raises(ArgumentError, match="max_decode_wait: expected None or seconds above 0, got"):
        Generator(model, **SIZES, max_decode_wait=wait)
    with pytest.raises(ArgumentError, match="max_decode_wait: expected None with batch_invariant=True"):
        Generator(model, **SIZES, max_decode_wait=0.1, batch_invariant=True)


@pytest.mark.parametrize("options", [{}, {"graphs": False}], ids=["loop", "one by one"])
def test_prompts_known_but_for_their_last_token_are_decodes(model: Any, options: dict[str, Any]) -> None:
    """They come with a prompt that fills the step, whose chunk leaves them room in the session's limit."""
    generator = Generator(model, **SIZES | {"max_batch_size": 5}, **options)
    known = [[10 * i + j for j in range(1, 9)] for i in range(1, 5)]
    prompts = [*([*head, 9] for head in known), list(range(40, 80))]
    three = SamplingParams(max_new_tokens=3, ignore_eos=True)
    apart = Generator(model, **SIZES, graphs=False, mixed_steps=False, prefix_cache=False)
    generator.generate(known, three)
    got, want = (engine.generate(prompts, three) for engine in (generator, apart))
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert generator.stats.prefix_cache.hit_tokens == 4 * 8
