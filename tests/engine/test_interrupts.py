"""Ctrl-C while the engine works: it waits until the step is over, a second one comes at once, and the
requests go on to the same tokens."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from interrupt import Interrupt

import torchpaged
from torchpaged.engine import Generator, SamplingParams
from torchpaged.engine.call_lock import interrupts_wait
from torchpaged.graphs import bucketed

ENGINE = Path(torchpaged.__file__).parent / "engine"
LOCKED = {str(ENGINE / name) for name in ("calls.py", "call_lock.py", "hand_out.py")}
TRACED = tuple({str(path) for path in (*ENGINE.rglob("*.py"), bucketed.__file__)} - LOCKED)
PROMPTS = [[11, 12, 13], [40, 41, 42, 43, 44, 45, 46], [70], [15, 16]]
LENGTHS = [9, 4, 13, 7]
POINTS = 90


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """A process that runs tests may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def make(model: Any) -> Generator:
    return Generator(
        model,
        block_size=4,
        max_batch_size=3,
        max_seq_len=32,
        prefill_chunk_size=16,
        compile=False,
        steps_per_launch=3,
        buckets=[1, 2, 3],
        num_blocks=26,
        lookahead=0,
        capture_ahead=False,
    )


def submit(generator: Generator) -> dict[int, list[int | None]]:
    params = [
        SamplingParams(
            max_new_tokens=n, temperature=0.9 * (i % 2), seed=i, repetition_penalty=1.2, ignore_eos=True
        )
        for i, n in enumerate(LENGTHS)
    ]
    return {generator.submit(prompt, p): [] for prompt, p in zip(PROMPTS, params, strict=True)}


def run(model: Any, at: int, times: int = 1) -> tuple[list[list[int | None]], Interrupt, int]:
    """The tokens of all requests, given to their ends through an interrupt at line ``at``; how many steps it
    ended."""
    generator, interrupt, ended = make(model), Interrupt(at, TRACED, times), 0
    tokens = submit(generator)
    for _ in range(100):
        if not generator.has_unfinished:
            break
        events = []
        try:
            with interrupt:
                events = generator.step()
        except KeyboardInterrupt:
            interrupt.at, ended = 0, ended + 1
        for event in events:
            tokens[event.request_id].append(event.token_id)
    assert generator.pool.num_used == 0, "blocks were lost"
    return list(tokens.values()), interrupt, ended


@pytest.fixture(scope="module")
def uninterrupted(model: Any) -> tuple[list[list[int | None]], int]:
    tokens, interrupt, _ = run(model, 0)
    assert [len(t) for t in tokens] == LENGTHS
    return tokens, interrupt.lines


@pytest.mark.slow_cases(but=("0-1", "1-2"))
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("share", range(POINTS // 15))
def test_no_token_is_lost_or_doubled(
    model: Any, uninterrupted: tuple[list[list[int | None]], int], share: int, times: int
) -> None:
    """Once: when the step is over. Twice: in the middle of it."""
    want, lines = uninterrupted
    wrong = []
    for point in range(share, POINTS, POINTS // 15):
        tokens, _, ended = run(model, 1 + point * lines // POINTS, times)
        assert ended == 1
        if tokens != want:
            wrong.append((point, tokens))
    assert not wrong


def test_a_launch_that_is_interrupted_comes_to_its_end(
    model: Any, uninterrupted: tuple[list[list[int | None]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is launched twice, and the events that the step did not return come with the next."""
    want, _ = uninterrupted
    generator, interrupted = make(model), make(model)
    tokens, ended = submit(interrupted), 0
    replay, begun, returned = type(interrupted.runner)._replay, [], []

    def replay_interrupted(self: Any, graph: Any) -> None:
        begun.append(graph)
        if len(begun) % 2:
            signal.raise_signal(signal.SIGINT)
        replay(self, graph)
        returned.append(graph)

    with monkeypatch.context() as patch:
        patch.setattr(type(interrupted.runner), "_replay", replay_interrupted)
        while interrupted.has_unfinished:
            events = []
            try:
                events = interrupted.step()
            except KeyboardInterrupt:
                ended += 1
            assert len(returned) == len(begun)
            for event in events:
                tokens[event.request_id].append(event.token_id)
    submit(generator)
    for _ in generator.stream():
        pass
    assert ended > 1
    assert list(tokens.values()) == want
    hits = [[report.hits for report in made.runner.report()] for made in (generator, interrupted)]  # type: ignore[union-attr]
    assert hits[0] == hits[1]


def test_signals_at_any_time(model: Any, uninterrupted: tuple[list[list[int | None]], int]) -> None:
    """By a timer. Who calls `step` loses what it returns when a signal arrives right behind it; the requests'
    own logs lose nothing."""
    want, _ = uninterrupted
    rng, ended, steps = random.Random(0), 0, False
    before = signal.signal(signal.SIGVTALRM, lambda *_: signal.raise_signal(signal.SIGINT) if steps else None)
    try:
        for _ in range(8):
            generator = make(model)
            sequences = [generator._requests[request] for request in submit(generator)]
            while generator.has_unfinished:
                if not signal.getitimer(signal.ITIMER_VIRTUAL)[0]:  # a step can be shorter than a tick
                    signal.setitimer(signal.ITIMER_VIRTUAL, rng.uniform(1e-4, 2e-2))
                try:
                    steps = True
                    generator.step()
                    steps = False
                except KeyboardInterrupt:
                    steps = False
                    ended += 1
            assert [[event.token_id for event in sequence.log] for sequence in sequences] == want
            assert generator.pool.num_used == 0
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert ended


def test_whose_handler_it_is_and_where() -> None:
    """The one that was set gets the signal, once; a thread, and a process without one, go without."""
    got: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        got.append(number)

    signal.signal(signal.SIGINT, handler)
    with interrupts_wait(), interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        assert got == []
    assert got == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler
    with interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert len(got) == 3, "a second one does not wait"
    assert len(got) == 3
    alarms = signal.signal(signal.SIGALRM, handler)
    with interrupts_wait():
        signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGINT)
        assert len(got) == 3, "each is the first of its kind"
    signal.signal(signal.SIGALRM, alarms)
    assert sorted(got[3:]) == [signal.SIGINT, signal.SIGALRM]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_wait():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)
        got.clear()
    assert got == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def elsewhere() -> None:
        with interrupts_wait():
            got.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert got == [True]


class TooLate(Exception):
    """Of a caller's time limit."""


@pytest.mark.parametrize("step", [1, 4])
def test_a_time_limit_raises_behind_the_step(
    model: Any, uninterrupted: tuple[list[list[int | None]], int], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no error of the step, in which the alarm came."""

    def late(*_: Any) -> None:
        raise TooLate

    before = signal.signal(signal.SIGALRM, late)
    generator, calls = make(model), iter(range(1, 99))
    tokens, advance = submit(generator), generator._stepper._steps.step

    def alarmed() -> None:
        if next(calls) == step:
            signal.raise_signal(signal.SIGALRM)
        advance()

    monkeypatch.setattr(generator._stepper._steps, "step", alarmed)
    raised = 0
    try:
        while generator.has_unfinished:
            try:
                for event in generator.step():
                    tokens[event.request_id].append(event.token_id)
            except TooLate:
                raised += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert raised == 1
    assert list(tokens.values()) == uninterrupted[0]
