"""The decode loop against the engine without graphs: the same tokens for any number of steps per launch,
whichever requests join, end or leave."""

import gc
import random
import sys
from types import FrameType
from typing import Any

import pytest
from engine_requests import sized as generator

from torchpaged import ArgumentError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.engine.sequence import Sequence
from torchpaged.graphs import TapeCapture

GREEDY = SamplingParams(max_new_tokens=17)
SEEDED = SamplingParams(
    max_new_tokens=17, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=3
)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(8, 99) for _ in range(rng.choice([1, 2, 5, 13, 40]))] for _ in range(count)]


def outcomes(outputs: Any) -> list[tuple[list[int], str]]:
    return [(o.token_ids, o.finish_reason) for o in outputs]


@pytest.fixture(scope="module")
def params() -> list[SamplingParams]:
    """Lengths that end anywhere within a launch, greedy and sampled rows in one batch, with and without the
    end token."""
    rng = random.Random(1)
    drawn = []
    for i in range(9):
        options: dict[str, Any] = {
            "max_new_tokens": rng.randint(1, 21),
            "ignore_eos": i % 3 == 0,
            "stop_token_ids": (9, 61, 2),
        }
        if i % 2:
            options |= {
                "temperature": 0.9,
                "seed": i,
                "top_p": 0.9 if i % 4 == 1 else 1.0,
                "repetition_penalty": 1.3 if i > 4 else 1.0,
            }
        drawn.append(SamplingParams(**options))
    return drawn


@pytest.fixture(scope="module")
def want(model: Any, params: list[SamplingParams]) -> list[tuple[list[int], str]]:
    eager = generator(model, graphs=False)
    assert eager.runner is None
    results = outcomes(eager.generate(prompts(9), params))
    # both ends occur, else the tests below prove less
    assert {reason for _, reason in results} == {"length", "stop"}
    return results


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
@pytest.mark.parametrize("options", [{}, {"buckets": [4]}, {"buckets": [1, 4], "lookahead": 20}], ids=str)
def test_steps_per_launch_change_no_token(
    model: Any, params: Any, want: Any, steps: int, options: dict[str, Any]
) -> None:
    loop = generator(model, steps_per_launch=steps, **options)
    assert outcomes(loop.generate(prompts(9), params)) == want
    assert loop.pool.num_free == loop.pool.num_usable
    assert not loop.has_unfinished
    assert sum(report.hits for report in loop.runner.report()) < sum(len(tokens) for tokens, _ in want)  # type: ignore[union-attr]


@pytest.mark.parametrize("steps", [1, 4])
def test_a_replay_takes_nothing_from_the_host(model: Any, params: Any, want: Any, steps: int) -> None:
    """On a tape, as in a CUDA graph, Python is not run at replay and a device value read on the host is
    an error."""
    loop = generator(
        model, steps_per_launch=steps, capture=TapeCapture(), backend="reference", buckets=[2, 4]
    )
    assert outcomes(loop.generate(prompts(9), params)) == want


@pytest.mark.parametrize("steps", [1, 3])
def test_preemption_changes_no_token(model: Any, steps: int) -> None:
    each = [
        SamplingParams(
            max_new_tokens=30,
            ignore_eos=True,
            temperature=0.7 * (i % 2),
            seed=i,
            repetition_penalty=1.3 if i > 2 else 1.0,
        )
        for i in range(9)
    ]
    want = outcomes(generator(model, graphs=False).generate(prompts(9), each))
    small = generator(model, steps_per_launch=steps, num_blocks=20, lookahead=8)
    assert outcomes(small.generate(prompts(9), each)) == want
    assert small.stats.preemptions > 0
    assert small.pool.num_free == small.pool.num_usable


@pytest.mark.slow_cases(but=("4-greedy",))
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("steps", [1, 4])
def test_soak_of_joining_ending_and_cancelling(model: Any, sampling: SamplingParams, steps: int) -> None:
    """Requests join at random, some are cancelled: every token seen is the one the request gets alone."""
    rng, queue = random.Random(steps), prompts(25, seed=5)
    alone = generator(model, graphs=False)
    want = {tuple(p): alone.generate([p], sampling)[0].token_ids for p in queue}
    loop = generator(model, steps_per_launch=steps, buckets=[1, 2, 4], lookahead=12)
    seen: dict[int, list[int]] = {}
    asked: dict[int, list[int]] = {}
    ended: dict[int, str] = {}
    while queue or loop.has_unfinished:
        if queue and rng.random() < 0.3:
            prompt = queue.pop()
            asked[loop.submit(prompt, sampling)] = prompt
        if rng.random() < 0.05 and (alive := [r for r in asked if r not in ended]):
            loop.cancel(rng.choice(alive))
        for event in loop.step():
            assert event.request_id not in ended
            if event.token_id is not None:
                seen.setdefault(event.request_id, []).append(event.token_id)
            if event.finish_reason:
                ended[event.request_id] = event.finish_reason
    assert ended.keys() == asked.keys()
    assert "cancelled" in ended.values()
    for request, prompt in asked.items():
        got, full = seen.get(request, []), want[tuple(prompt)]
        assert got == (full[: len(got)] if ended[request] == "cancelled" else full)
    assert loop.pool.num_free == loop.pool.num_usable


def test_a_prefill_that_fails_loses_no_blocks(
    model: Any, params: Any, want: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that decode were given blocks in the same step. All requests begin again, behind each of the first
    passes; a pass that failed each second time for ever would let none of them come to its end."""
    loop, failures = generator(model), [0]
    seen: dict[int, list[int | None]] = {}
    packed = loop._stepper._packed
    prefill = packed.prefill

    def every_second_fails(*batch: Any) -> Any:
        failures[0] += 1
        if failures[0] % 2 and failures[0] < 20:
            raise KeyboardInterrupt
        return prefill(*batch)

    monkeypatch.setattr(packed, "prefill", every_second_fails)
    for prompt, sampling in zip(prompts(9), params, strict=True):
        seen[loop.submit(prompt, sampling)] = []
    while loop.has_unfinished:
        try:
            for event in loop.step():
                seen[event.request_id] += [event.token_id]
        except KeyboardInterrupt:
            continue
        assert all(len(s.blocks) == s.blocks_on_device for s in loop.scheduler.running if s.row is not None)
    assert failures[0] > 9
    assert list(seen.values()) == [tokens for tokens, _ in want]


def test_a_launch_is_the_same_work_for_any_number_of_rows(model: Any) -> None:
    """The package's function calls are counted: what looks at every row is left to steps in which the
    scheduler gave blocks away. Calls inside torch, and finalizers, vary from run to run."""
    calls: dict[tuple[int, bool], int] = {}

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event.endswith("call") and frame.f_globals.get("__name__", "").startswith("torchpaged."):
            calls[rows, blocks_added] += 1

    for rows in (1, 4):
        engine = generator(model, buckets=[4])
        for prompt in prompts(rows):
            engine.submit(prompt, SamplingParams(max_new_tokens=50, ignore_eos=True))
        for _ in range(20):  # all run, and every slot of the ring was used
            engine.step()
        for blocks_added in (False, True):
            calls[rows, blocks_added], engine.loop.blocks_added = 0, blocks_added
            gc.disable()
            sys.setprofile(count)
            engine.loop.launch()
            sys.setprofile(None)
            gc.enable()
            engine.loop.launches.collect()
    assert calls[1, False] == calls[4, False]
    assert calls[1, True] < calls[4, True]
    assert Sequence.__eq__ is object.__eq__, (
        "compared field by field, 64 requests took the scheduler a millisecond"
    )


def test_a_stop_that_only_the_host_sees_drops_the_rest(model: Any, want: Any) -> None:
    """More stop ids than the device looks at: the row runs on until the host has read it, and nothing more
    is emitted."""
    free = SamplingParams(max_new_tokens=20, ignore_eos=True)
    tokens = generator(model, graphs=False).generate([prompts(9)[2]], free)[0].token_ids
    stop = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    params = SamplingParams(
        max_new_tokens=20,
        ignore_eos=True,
        stop_token_ids=(*[t for t in range(99) if t not in tokens][:20], stop),
    )
    loop = generator(model, steps_per_launch=8)
    output = loop.generate([prompts(9)[2]], params)[0]
    assert output.finish_reason == "stop"
    assert output.token_ids == tokens[: tokens.index(stop) + 1]
    again = loop.generate([prompts(9)[3]], GREEDY)[0].token_ids  # the row is clean
    assert again == generator(model, graphs=False).generate([prompts(9)[3]], GREEDY)[0].token_ids


def test_rows_close_up_when_a_smaller_bucket_does(model: Any) -> None:
    loop = generator(model, buckets=[1, 4], steps_per_launch=2)
    lengths = [3, 3, 3, 20]
    params, alone = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lengths], {"graphs": False}
    pairs = zip(prompts(4), params, strict=True)
    want = [generator(model, **alone).generate([p], one)[0].token_ids for p, one in pairs]
    got = loop.generate(prompts(4), params)
    hits = {report.bucket: report.hits for report in loop.runner.report()}  # type: ignore[union-attr]
    assert [o.token_ids for o in got] == want
    assert hits[1] > hits[4] > 0


def test_refusals(model: Any) -> None:
    for options, argument in (
        ({"steps_per_launch": 0}, "steps_per_launch"),
        ({"lookahead": -1}, "lookahead"),
        ({"graphs": False, "steps_per_launch": 2}, "steps_per_launch"),
    ):
        with pytest.raises(ArgumentError, match=argument):
            generator(model, **options)


def test_blocks_taken_back_from_a_row_are_not_used_by_it(model: Any) -> None:
    """A request has blocks far ahead of need, a long prompt takes them over, and the first one grows again,
    into other blocks."""
    first, second = [11, 12], [20 + i % 70 for i in range(38)]
    params = [
        SamplingParams(max_new_tokens=46, ignore_eos=True),
        SamplingParams(max_new_tokens=10, ignore_eos=True),
    ]
    want = outcomes(generator(model, graphs=False).generate([first, second], params))
    loop = generator(model, num_blocks=22, lookahead=40, steps_per_launch=2, prefill_chunk_size=64)
    ids = [loop.submit(first, params[0])]
    tokens: dict[int, list[int]] = {}
    most = 0
    while loop.has_unfinished:
        for event in loop.step():
            tokens.setdefault(event.request_id, []).append(event.token_id)  # type: ignore[arg-type]
        most = max(most, loop.pool.num_used)
        for sequence in loop.scheduler.running:
            assert (
                loop.loop.rows.block_table[sequence.row, : len(sequence.blocks)].tolist() == sequence.blocks
            )  # type: ignore[union-attr]
        if len(ids) == 1 and len(tokens.get(ids[0], ())) >= 10:
            assert most >= 11  # it holds the blocks it will need much later
            ids.append(loop.submit(second, params[1]))
    assert [tokens[i] for i in ids] == [each for each, _ in want]
    assert not loop.stats.preemptions


@pytest.mark.parametrize("graphs", [True, False])
def test_a_paged_model_brings_its_own_blocks(model: Any, graphs: bool) -> None:
    """Rows are as wide as the pool's block size asks; what would shape another cache is refused."""
    from torchpaged.hf import PagedModel

    paged = PagedModel(model, num_blocks=60, block_size=4)
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    want = outcomes(generator(model, graphs=False).generate(prompts(2), params))
    loop = Generator(paged, max_batch_size=2, max_seq_len=96, graphs=graphs, compile=False)
    assert outcomes(loop.generate(prompts(2), params)) == want
    shaping = {"block_size": 4, "num_blocks": 9, "kv_cache_memory": 1 << 20, "backend": "cpu", "fuse": True}
    for name, value in shaping.items():
        with pytest.raises(ArgumentError, match=name):
            Generator(paged, **{name: value})


@pytest.mark.parametrize("ran", [False, True], ids=["before", "behind"])
def test_an_interrupted_launch_loses_no_token(model: Any, ran: bool) -> None:
    """Ctrl-C right before a replay, or behind it before it was counted: the next steps give the
    same tokens."""
    want = outcomes(generator(model, steps_per_launch=2).generate(prompts(3), GREEDY))
    engine = generator(model, steps_per_launch=2, capture=TapeCapture(), buckets=[4])
    engine.runner.capture()
    graph = engine.runner._graphs[4]
    replay, calls = graph.replay, []

    def interrupted() -> None:
        calls.append(None)
        if len(calls) == 4 and not ran:
            raise KeyboardInterrupt
        replay()
        if len(calls) == 4:
            raise KeyboardInterrupt

    graph.replay = interrupted
    ids = [engine.submit(prompt, GREEDY) for prompt in prompts(3)]
    tokens: dict[int, list[int]] = {i: [] for i in ids}
    interrupts = 0
    while engine.has_unfinished:
        try:
            events = engine.step()
        except KeyboardInterrupt:
            interrupts += 1
            continue
        for event in events:
            tokens[event.request_id].append(event.token_id)
    assert interrupts == 1
    assert [tokens[i] for i in ids] == [got for got, _ in want]
