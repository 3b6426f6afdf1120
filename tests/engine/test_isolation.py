"""One request never harms another: whatever goes wrong, and wherever, the next requests get the tokens of a
fresh engine and all blocks are free."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from engine_requests import EACH, ENGINES, PROMPTS, Letters, assert_unharmed, engine, submit_all, tokens_of
from interrupt import Interrupt

import torchpaged
from torchpaged.custom_ops.errors import NotCopyableError, RequestError, TorchpagedError
from torchpaged.engine import Generator

pytestmark = pytest.mark.timeout(300)  # a hang is a failure
OF_THE_ENGINE = tuple(str(Path(torchpaged.__file__).parent / part) for part in ("engine", "cache"))
CALL_FILES = tuple(
    str(Path(torchpaged.__file__).parent / "engine" / f"{name}.py")
    for name in ("request_calls", "calls", "call_lock", "hand_out", "interrupts")
)


# --------------------------------------------------------------------------------------------- one that fails
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("call", [1, 2, 4, 6])
def test_nan_logits_end_that_request_alone(
    faulty: Any, want: list[list[int]], call: int, options: dict[str, Any]
) -> None:
    generator = engine(faulty, **options)
    faulty.fault = lambda number: 0 if number == call else None
    outputs = generator.generate(PROMPTS, EACH)
    failed = [output for output in outputs if output.finish_reason == "error"]
    assert len(failed) == 1
    assert isinstance(failed[0].error, RequestError)
    assert "NaN" in str(failed[0].error)
    for output, tokens in zip(outputs, want, strict=True):
        assert output.token_ids == (tokens[: len(output.token_ids)] if output.error else tokens)
    assert pickle.loads(pickle.dumps(failed[0])).error.request_id == failed[0].request_id
    assert_unharmed(generator, want)


def test_a_tokenizer_that_fails_ends_that_request_alone(faulty: Any, want: list[list[int]]) -> None:
    generator, tokenizer = engine(faulty), Letters()
    generator.tokenizer = tokenizer
    tokenizer.broken = next(token for token in want[0] if not any(token in other for other in want[1:]))
    outputs = generator.generate(PROMPTS, EACH)
    assert [output.finish_reason for output in outputs] == ["error", "length", "length", "length"]
    assert "decode" in str(outputs[0].error)
    assert tokens_of(outputs)[1:] == want[1:]
    generator.tokenizer = None
    assert_unharmed(generator, want)


def test_a_tokenizer_that_fails_behind_an_interrupt_ends_that_request_alone(
    faulty: Any, want: list[list[int]]
) -> None:
    generator, tokenizer = engine(faulty), Letters()
    generator.tokenizer = tokenizer
    ids = submit_all(generator)
    events = [event for _ in range(6) for event in generator.step()]
    tokenizer.broken = next(t for t in want[0] if not any(t in other for other in want[1:]))
    while not any(event.token_id == tokenizer.broken for event in events):
        tokenizer.broken, broken = -1, tokenizer.broken
        events += generator.step()
        tokenizer.broken = broken

    def fault(call: int) -> None:
        faulty.fault = lambda call: None
        raise KeyboardInterrupt

    faulty.fault = fault
    with pytest.raises(KeyboardInterrupt):
        for _ in range(5):
            events += generator.step()
    while generator.has_unfinished:
        events += generator.step()
    ends = {event.request_id: event.finish_reason for event in events if event.finish_reason}
    assert ends == dict(zip(ids, ["error", "length", "length", "length"], strict=True))
    generator.tokenizer = None
    assert_unharmed(generator, want)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_a_step_that_breaks_off_can_be_taken_again(
    faulty: Any, want: list[list[int]], options: dict[str, Any], error: type[BaseException]
) -> None:
    """Requests driven by `step` go on from the tokens that were given, none lost and none twice; an error
    that comes at times is rarely raised."""
    generator = engine(faulty, **options)

    def fault(call: int) -> None:
        if call % (11 if options.get("steps_per_launch") == 3 else 5) == 0:
            raise error

    faulty.fault = fault
    ids = submit_all(generator)
    seen: dict[int, list[int | None]] = {request: [] for request in ids}
    failures = 0
    while generator.has_unfinished:
        try:
            for event in generator.step():
                seen[event.request_id].append(event.token_id)
        except error:
            failures += 1
    assert failures > 1 or error is not KeyboardInterrupt
    assert list(seen.values()) == want
    assert_unharmed(generator, want)


def test_a_callback_that_calls_the_generator_is_refused(faulty: Any, want: list[list[int]]) -> None:
    """Not a deadlock."""
    generator = engine(faulty)
    faulty.fault = lambda call: generator.submit([5]) and None
    with pytest.raises(TorchpagedError, match="inside one of its own steps"):
        generator.generate(PROMPTS, EACH)
    assert_unharmed(generator, want)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"]
)
def test_a_generator_is_not_copied(faulty: Any, copied: Any) -> None:
    with pytest.raises(NotCopyableError, match="a Generator can't be copied or pickled"):
        copied(engine(faulty))


# ----------------------------------------------------------------------------------------- anything, anywhere
def by_generate(generator: Generator) -> None:
    generator.generate(PROMPTS, EACH)


def by_stream(generator: Generator) -> None:
    ids = submit_all(generator)
    for count, event in enumerate(generator.stream()):
        if count == 7 and event.request_id != ids[2]:
            generator.cancel(ids[2])


def test_events_of_a_step_interrupted_while_it_hands_them_out_come_with_the_next(
    faulty: Any, want: list[list[int]]
) -> None:
    """Ctrl-C at every line between the step's work and its return, `Inbox` and lock included."""
    lost, points = [], 0
    generator = engine(faulty, graphs=False)
    files = CALL_FILES
    while True:
        ids = [generator.submit(PROMPTS[i], dataclasses.replace(EACH[i], max_new_tokens=2)) for i in (0, 3)]
        seen: dict[int, list[int | None]] = {request: [] for request in ids}
        interrupt = Interrupt(points + 1, files)
        while generator.has_unfinished:
            events = []
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                events = generator.step()
            for event in events:
                seen[event.request_id].append(event.token_id)
        if interrupt.lines <= points:
            break
        points += 1
        if list(seen.values()) != [want[0][:2], want[3][:2]]:
            lost.append((interrupt.where, seen))
    assert points > 40, (points, lost)
    assert not lost, (points, lost)
    assert_unharmed(generator, want)


def test_a_stream_interrupted_while_it_begins_leaves_no_request_without_an_owner(
    faulty: Any, want: list[list[int]]
) -> None:
    """Ctrl-C at every line of stream(ids): its requests are cancelled, or still belong to all."""
    generator, points = engine(faulty, graphs=False), 0
    files = CALL_FILES
    while True:
        ids = submit_all(generator)
        interrupt, taken = Interrupt(points + 1, files), None
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            taken = generator.stream(ids[1:3])
        if taken is None:
            owned = {sequence.request_id for sequence in generator._calls.inbox.live}
            assert owned == generator._stepper.requests.keys(), interrupt.where
            assert owned >= {ids[0], ids[3]}, interrupt.where
        done = {event.request_id: event.finish_reason for event in taken or ()}
        done |= {event.request_id: event.finish_reason for event in generator.stream()}
        assert not generator.has_unfinished
        assert generator.pool.num_free == generator.pool.num_usable
        assert done.keys() >= {ids[0], ids[3]}
        assert set(done.values()) <= {"length", "cancelled"}
        if interrupt.lines <= points:
            break
        points += 1
    assert points > 20
    assert taken is not None
    assert set(done.values()) == {"length"}
    assert_unharmed(generator, want)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("seed", range(2))
def test_failures_at_random_points(
    faulty: Any, want: list[list[int]], options: dict[str, Any], seed: int
) -> None:
    """One engine, one mishap after another; after each it serves as a new one does."""
    rng, generator = random.Random(seed), engine(faulty, **options)
    work = [by_generate, by_stream]
    lines = []
    for run in work:
        run(generator)  # with all that is known of the prompts, a run has the fewest lines
        with Interrupt(0, OF_THE_ENGINE) as count:
            run(generator)
        lines.append(count.lines)
    assert min(lines) > 500
    for _ in range(10):
        which, kind = (
            rng.randrange(2),
            rng.choice(["line", "line", "line", "forward", "forward interrupted", "nan", "left"]),
        )
        run, faulty.calls, at = work[which], 0, rng.randint(1, 12)
        if kind == "line":
            with (
                pytest.raises(KeyboardInterrupt),
                Interrupt(rng.randint(1, lines[which] - 50), OF_THE_ENGINE),
            ):
                run(generator)
        elif kind == "left":
            submit_all(generator)
            stream = generator.stream()
            for _ in range(at):
                next(stream)
            stream.close()  # type: ignore[attr-defined]
        else:
            error = {"forward": RuntimeError, "forward interrupted": KeyboardInterrupt}.get(kind)

            def fault(call: int, at: int = at, error: type[BaseException] | None = error) -> int | None:
                if call == at and error is not None:
                    raise error
                return rng.randrange(3) if call == at else None

            faulty.fault = fault
            if error is not KeyboardInterrupt:  # one that comes once is not raised
                run(generator)
            else:
                with pytest.raises(error):
                    run(generator)
        if generator.has_unfinished:  # requests that were submitted before a stream began: no call left them
            assert kind == "line"
            assert run is by_stream
            faulty.fault = lambda call: None
            for _ in generator.stream():
                pass
        assert_unharmed(generator, want)
