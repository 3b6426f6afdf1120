"""One request never harms another: whatever goes wrong, and wherever, the next requests get the tokens of a
fresh engine and all blocks are free."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import linecache
import pickle
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from engine_requests import EACH, ENGINES, PROMPTS, TINY, faulty_model

import torchpaged
from torchpaged import ArgumentError
from torchpaged.custom_ops.errors import NotCopyableError, RequestError, TorchpagedError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.engine.call_lock import CallLock

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.timeout(120)  # a hang is a failure
OF_THE_ENGINE = tuple(str(Path(torchpaged.__file__).parent / part) for part in ("engine", "cache"))
CALL_FILES = tuple(
    str(Path(torchpaged.__file__).parent / "engine" / f"{name}.py")
    for name in ("request_calls", "calls", "call_lock", "hand_out", "interrupts")
)


@pytest.fixture(scope="module")
def model(make_llama: Callable[..., Any]) -> Any:
    return faulty_model(make_llama(**TINY))


@pytest.fixture(autouse=True)
def no_fault(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        request.getfixturevalue("model").fault = lambda call: None


def engine(model: Any, **options: Any) -> Generator:
    model.fault = lambda call: None
    defaults = {
        "max_batch_size": 3,
        "max_seq_len": 64,
        "prefill_chunk_size": 16,
        "compile": False,
        "capture_ahead": options.get("graphs", True),  # without graphs there is nothing to capture
    }
    generator = Generator(model, **{**defaults, **options})
    model.calls = 0
    return generator


def tokens_of(outputs: Any) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def want(model: Any) -> list[list[int]]:
    return tokens_of(engine(model, graphs=False).generate(PROMPTS, EACH))


def assert_unharmed(generator: Generator, want: list[list[int]]) -> None:
    generator.model.fault = lambda call: None  # type: ignore[attr-defined]
    outputs = generator.generate(PROMPTS, EACH)
    assert tokens_of(outputs) == want
    assert {output.finish_reason for output in outputs} == {"length"}
    assert generator.pool.num_free == generator.pool.num_usable
    assert not generator.has_unfinished


# ----------------------------------------------------------------------------------------------- bad requests
INTEGERS = [
    1.5,
    2.0,
    "1",
    True,
    numpy.float32(1.0),
    numpy.bool_(True),
    torch.tensor(1),
    float("nan"),
    10**5000,
    -(10**5000),
    [1],
    1j,
]
FLOATS = [
    "1",
    True,
    float("nan"),
    float("inf"),
    10**400,
    1j,
    [0.5],
    torch.tensor(0.5),
    numpy.float64("nan"),
    -0.5,
]
BAD = {
    **dict.fromkeys(("top_k", "seed"), INTEGERS),
    "max_new_tokens": [x for x in INTEGERS if x is not INTEGERS[8]] + [0, -1, None],
    **{name: [*FLOATS, None] for name in ("temperature", "top_p", "min_p", "repetition_penalty")},
    "stop": ["text", ("",), (1,), {"a"}, None, (None,), b"x"],
    "stop_token_ids": [3, (1.5,), (True,), "12", {3}, None, (2**63,), (-1,), ("a",)],
    "ignore_eos": [1, None, "yes"],
    **{name: [x for x in INTEGERS if x is not INTEGERS[8]] + [-1] for name in ("logprobs", "n")},
    "min_new_tokens": [*INTEGERS, None, -1, 65],
    "logit_bias": [
        *(None, [(3, 0.5)], {3: "1"}, {3: None}, {3: True}, {1.5: 1.0}, {-1: 1.0}, {"3": 1.0}),
        *({3: float("nan")}, {3: float("inf")}, {3: 1e39}),
    ],
    "extra_args": [3.0, None, "12", {3.0}, ("1",), (True,), (float("nan"),), (float("inf"),), (1e39,)],
}


@pytest.mark.parametrize("name", BAD)
def test_every_field_is_checked_by_type_and_range(name: str) -> None:
    values = BAD[name] + ([2**63, -(2**63) - 1] if name == "seed" else [2**31, -1] if name == "top_k" else [])
    for value in values:
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            SamplingParams(**{name: value})


def test_numbers_of_numpy_become_plain() -> None:
    params = SamplingParams(
        max_new_tokens=numpy.int32(3),
        seed=numpy.int64(-5),
        top_k=numpy.uint8(4),
        temperature=numpy.float32(0.5),
        top_p=1,
        stop=["a"],
        stop_token_ids=[numpy.int64(4)],
        logit_bias={numpy.int64(4): numpy.float32(0.5)},
        extra_args=[1, numpy.float64(0.5)],
    )
    assert [type(x) for x in (*params.logit_bias, *params.logit_bias.values(), *params.extra_args)] == [
        *(int, float),
        *(float, float),
    ]
    assert params == SamplingParams(
        max_new_tokens=3,
        seed=-5,
        top_k=4,
        temperature=0.5,
        top_p=1.0,
        stop=("a",),
        stop_token_ids=(4,),
        logit_bias={4: 0.5},
        extra_args=(1.0, 0.5),
    )
    assert [
        type(x)
        for x in (
            params.max_new_tokens,
            params.seed,
            params.temperature,
            params.top_p,
            params.stop_token_ids[0],
        )
    ] == [int, int, float, float, int]


def test_bad_prompts_are_refused_before_anything_is_queued(model: Any, want: list[list[int]]) -> None:
    generator = engine(model)
    for prompt in (
        [1.5],
        [True],
        [5, True],
        [5, 98, 99],
        ["a"],
        [[1, 2]],
        torch.tensor([1.0]),
        torch.tensor([[1, 2]]),
        7,
        None,
        b"ab",
        {"input_ids": [1]},
        [99],
        [-1],
        [],
    ):
        with pytest.raises(ArgumentError, match="^prompt: expected"):
            generator.submit(prompt)
        with pytest.raises(ArgumentError, match="^prompts?: expected"):
            generator.generate([PROMPTS[0], prompt])
    for sampling in (3, {"top_k": 2}, [SamplingParams()], "greedy"):
        with pytest.raises(ArgumentError, match="^sampling: expected"):
            generator.submit(PROMPTS[0], sampling)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^stop_token_ids: expected token ids in \[0, 99\), got 99"):
        generator.submit(PROMPTS[0], SamplingParams(stop_token_ids=(99,)))
    with pytest.raises(ArgumentError, match="^prompts: expected"):
        generator.generate([5, 6, 7])
    with pytest.raises(ArgumentError, match="^max_batch_size: expected an integer"):
        engine(model, max_batch_size=2.5)
    assert not generator.has_unfinished
    assert (
        generator.generate([torch.tensor(PROMPTS[0]), numpy.array(PROMPTS[2])], [EACH[0], EACH[2]])[
            1
        ].token_ids
        == want[2]
    )
    assert_unharmed(generator, want)


class Letters:
    """A tokenizer of one token per letter, which can't decode token ``broken``."""

    broken = -1

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 90 + 8 for letter in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        if self.broken in ids:
            raise KeyError(self.broken)
        return "".join(chr(i + 30) for i in ids)


def test_one_string_is_one_prompt(model: Any) -> None:
    generator = engine(model)
    generator.tokenizer = Letters()
    outputs = generator.generate("hello", EACH[0])
    assert len(outputs) == 1
    assert outputs[0].prompt_token_ids == Letters()("hello")["input_ids"]
    assert tokens_of(outputs) == tokens_of(generator.generate(["hello"], EACH[0]))


# --------------------------------------------------------------------------------------------- one that fails
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("call", [1, 2, 4, 6])
def test_nan_logits_end_that_request_alone(
    model: Any, want: list[list[int]], call: int, options: dict[str, Any]
) -> None:
    generator = engine(model, **options)
    model.fault = lambda number: 0 if number == call else None
    outputs = generator.generate(PROMPTS, EACH)
    failed = [output for output in outputs if output.finish_reason == "error"]
    assert len(failed) == 1
    assert isinstance(failed[0].error, RequestError)
    assert "NaN" in str(failed[0].error)
    for output, tokens in zip(outputs, want, strict=True):
        assert output.token_ids == (tokens[: len(output.token_ids)] if output.error else tokens)
    assert pickle.loads(pickle.dumps(failed[0])).error.request_id == failed[0].request_id
    assert_unharmed(generator, want)


def test_a_tokenizer_that_fails_ends_that_request_alone(model: Any, want: list[list[int]]) -> None:
    generator, tokenizer = engine(model), Letters()
    generator.tokenizer = tokenizer
    tokenizer.broken = next(token for token in want[0] if not any(token in other for other in want[1:]))
    outputs = generator.generate(PROMPTS, EACH)
    assert [output.finish_reason for output in outputs] == ["error", "length", "length", "length"]
    assert "decode" in str(outputs[0].error)
    assert tokens_of(outputs)[1:] == want[1:]
    generator.tokenizer = None
    assert_unharmed(generator, want)


def test_a_tokenizer_that_fails_behind_an_interrupt_ends_that_request_alone(
    model: Any, want: list[list[int]]
) -> None:
    generator, tokenizer = engine(model), Letters()
    generator.tokenizer = tokenizer
    ids = [generator.submit(prompt, params) for prompt, params in zip(PROMPTS, EACH, strict=True)]
    events = [event for _ in range(6) for event in generator.step()]
    tokenizer.broken = next(t for t in want[0] if not any(t in other for other in want[1:]))
    while not any(event.token_id == tokenizer.broken for event in events):
        tokenizer.broken, broken = -1, tokenizer.broken
        events += generator.step()
        tokenizer.broken = broken

    def fault(call: int) -> None:
        model.fault = lambda call: None
        raise KeyboardInterrupt

    model.fault = fault
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
    model: Any, want: list[list[int]], options: dict[str, Any], error: type[BaseException]
) -> None:
    """Requests driven by `step` go on from the tokens that were given, none lost and none twice; an error
    that comes at times is rarely raised."""
    generator = engine(model, **options)

    def fault(call: int) -> None:
        if call % (11 if options.get("steps_per_launch") == 3 else 5) == 0:
            raise error

    model.fault = fault
    ids = [generator.submit(prompt, params) for prompt, params in zip(PROMPTS, EACH, strict=True)]
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


# --------------------------------------------------------------------------------------------- whose requests
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_generate_inside_an_open_stream(model: Any, want: list[list[int]], options: dict[str, Any]) -> None:
    generator = engine(model, **options)
    ids = [generator.submit(PROMPTS[i], EACH[i]) for i in (0, 2)]
    seen: dict[int, list[int | None]] = {request: [] for request in ids}
    for count, event in enumerate(generator.stream()):
        seen[event.request_id].append(event.token_id)
        if count == 3:
            assert tokens_of(generator.generate([PROMPTS[1], PROMPTS[3]], [EACH[1], EACH[3]])) == [
                want[1],
                want[3],
            ]
    assert list(seen.values()) == [want[0], want[2]]
    assert_unharmed(generator, want)


def test_a_stream_that_is_left_cancels_its_requests(model: Any, want: list[list[int]]) -> None:
    generator = engine(model)
    for prompt, params in zip(PROMPTS, EACH, strict=True):
        generator.submit(prompt, params)
    for _ in generator.stream():
        break
    assert not generator.has_unfinished
    assert generator.pool.num_free == generator.pool.num_usable
    ids = [generator.submit(prompt, params) for prompt, params in zip(PROMPTS[:2], EACH, strict=False)]
    streams = [generator.stream([request]) for request in ids]
    with pytest.raises(ArgumentError, match="request_ids"):
        generator.stream([ids[0]])
    firsts = [next(stream) for stream in streams]
    assert [event.request_id for event in firsts] == ids
    streams[0].close()  # type: ignore[attr-defined]
    assert [firsts[1].token_id, *(event.token_id for event in streams[1])] == want[1]
    generator.submit(PROMPTS[0])
    stream = generator.stream()
    next(stream)
    with pytest.raises(TorchpagedError, match="another stream"):
        next(generator.stream())
    stream.close()  # type: ignore[attr-defined]
    assert_unharmed(generator, want)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("held", range(1, 5))
@pytest.mark.parametrize("how", ["step", "stream", "both"])
def test_what_a_suspended_stream_holds_comes_in_order_from_any_call(
    model: Any, want: list[list[int]], options: dict[str, Any], held: int, how: str
) -> None:
    """A stream over all gives ``held`` events and waits; its other events of the same step, ends included,
    are the next call's."""
    generator, which = engine(model, **options), (0, 2, 3)
    short = [dataclasses.replace(EACH[i], max_new_tokens=1 + 2 * (i == 2)) for i in which]
    ids = [generator.submit(PROMPTS[i], params) for i, params in zip(which, short, strict=True)]
    expected = {
        request: want[i][:3] if i == 2 else want[i][:1] for request, i in zip(ids, which, strict=True)
    }
    seen: dict[int, list[Any]] = {request: [] for request in ids}

    def take(events: Any) -> None:
        for event in events:
            assert not seen[event.request_id] or seen[event.request_id][-1].finish_reason is None
            seen[event.request_id].append(event)

    of_all = generator.stream()
    take(next(of_all) for _ in range(held))
    if how != "step":
        open_ids = [request for request in ids if not seen[request] or not seen[request][-1].finish_reason]
        take(list(generator.stream(open_ids[-1:])))
        assert [event.token_id for event in seen[open_ids[-1]]] == expected[open_ids[-1]]
    if how != "stream":
        while generator.has_unfinished:
            take(generator.step())
    take(of_all)
    assert {request: [event.token_id for event in events] for request, events in seen.items()} == expected
    assert_unharmed(generator, want)


@pytest.mark.parametrize(
    "options", [*ENGINES.values(), {"steps_per_launch": 12}], ids=[*ENGINES, "one launch"]
)
def test_a_request_that_has_ended_is_not_cancelled(
    model: Any, want: list[list[int]], options: dict[str, Any]
) -> None:
    """Whether its owner has its last event or not: it may have ended in the launch whose first event has just
    come."""
    generator = engine(model, **options)
    ids = [generator.submit(PROMPTS[i], EACH[i]) for i in (0, 3)]
    seen: dict[int, list[int | None]] = {request: [] for request in ids}
    for event in generator.stream():
        seen[event.request_id].append(event.token_id)
        if event.request_id == ids[1] and len(seen[ids[1]]) >= 2:
            generator.cancel(ids[1])
            generator.cancel(ids[1])
    generator.cancel(ids[0])
    assert seen[ids[0]] == want[0]
    *tokens, last = seen[ids[1]]
    assert tokens == want[3][: len(tokens)]
    assert last in (None, want[3][-1])
    for unknown in (ids[1] + 1, -1, "0", 1.0, True):
        with pytest.raises(ArgumentError, match=r"request_id: expected an id that submit\(\) has given"):
            generator.cancel(unknown)  # type: ignore[arg-type]
    assert_unharmed(generator, want)


def test_a_stream_and_steps_of_two_threads_give_each_event_once(model: Any, want: list[list[int]]) -> None:
    """One thread streams over all, two others step: the first to come has an event, and no other."""
    generator, wrong = engine(model, steps_per_launch=3), []
    seen: dict[int, list[int | None]] = {}
    ids = [generator.submit(PROMPTS[i], EACH[i]) for i in (0, 1, 2, 3) * 6]

    def take(events: Any) -> None:
        for event in events:
            seen.setdefault(event.request_id, []).append(event.token_id)

    def steps() -> None:
        try:
            while generator.has_unfinished:
                take(generator.step())
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=steps) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        take(generator.stream())
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    assert {request: sorted(tokens) for request, tokens in seen.items()} == {  # type: ignore[type-var]
        request: sorted(want[i]) for request, i in zip(ids, (0, 1, 2, 3) * 6, strict=True)
    }
    assert_unharmed(generator, want)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_submit_that_breaks_off_leaves_no_event(
    model: Any, want: list[list[int]], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No caller has the request's id, so that none is told that it was cancelled."""
    generator = Generator(model, max_batch_size=2, max_seq_len=64, prefill_chunk_size=16, graphs=graphs)
    add = generator._stepper.add

    def interrupted(sequence: Any) -> None:
        add(sequence)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(generator._stepper, "add", interrupted)
        generator.submit([5, 6, 7])
    assert not generator.has_unfinished
    assert generator.step() == []
    assert list(generator.stream()) == []
    request = generator.submit(PROMPTS[0], EACH[0])
    assert [event.token_id for event in generator.stream()] == want[0]
    assert request == 1
    assert generator.pool.num_used == 0


def test_a_stream_that_is_never_begun_cancels_its_requests(model: Any, want: list[list[int]]) -> None:
    """They belong to it: no other call would give their events, and they would run on, and hold their blocks,
    in later calls."""
    generator = engine(model)
    ids = [generator.submit(prompt, params) for prompt, params in zip(PROMPTS[:2], EACH, strict=False)]
    kept = generator.stream([ids[1]])
    generator.stream([ids[0]])
    gc.collect()
    assert [event.token_id for event in kept] == want[1]
    assert not generator.has_unfinished
    assert_unharmed(generator, want)


@pytest.mark.parametrize("place", ["behind acquire", "ahead of release"])
def test_a_stream_collected_as_garbage_while_the_lock_changes_hands(
    model: Any, want: list[list[int]], place: str
) -> None:
    """The collector may run at any call, between the lock and the note of who holds it too: its thread must
    not wait for itself."""
    generator, left = engine(model), []

    def collect(here: str) -> None:
        if here == place and not left:
            left.append(here)
            generator._calls.leave([])

    class Queue(dict[int, None]):
        def pop(self, *arguments: Any) -> Any:
            collect("behind acquire")
            return super().pop(*arguments)

    class Traced(CallLock):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_holder" and value == 0:
                collect("ahead of release")

    lock = generator._calls.lock
    lock._queue, lock.__class__ = Queue(), Traced
    other = threading.Thread(target=generator.step, daemon=True)
    other.start()
    other.join(20)
    assert left, "it waits for the lock that it holds"
    assert not other.is_alive(), "it waits for the lock that it holds"
    assert_unharmed(generator, want)


def test_a_request_submitted_while_a_stream_breaks_off_has_an_owner(
    model: Any, want: list[list[int]]
) -> None:
    """The submitting thread is inside, its request not queued yet, when a stream over all requests is closed
    and waits for the lock."""
    generator, inside, closing, ids = engine(model), threading.Event(), threading.Event(), []

    class Slow(Letters):
        def __call__(self, text: str) -> dict[str, list[int]]:
            inside.set()
            assert closing.wait(60)
            return super().__call__(text)

    class Noticed(dict[int, None]):
        """The queue for the lock: a thread that stands in it has done all that it does outside."""

        def __setitem__(self, thread: int, value: None) -> None:
            super().__setitem__(thread, value)
            closing.set()

    generator.tokenizer = Slow()
    generator.submit(PROMPTS[0], EACH[0])
    stream = generator.stream()
    next(stream)
    other = threading.Thread(target=lambda: ids.append(generator.submit("hello", EACH[1])))
    other.start()
    assert inside.wait(60)
    generator._calls.lock._queue = Noticed()
    stream.close()  # type: ignore[attr-defined]
    other.join(60)
    owned = {
        sequence.request_id for sequence in (*generator._calls.inbox.live, *generator._calls.inbox.ready)
    }
    assert len(ids) == 1
    assert ids[0] in owned or ids[0] not in generator._stepper.requests
    generator.tokenizer = None
    for _ in generator.stream():
        pass
    assert not generator.has_unfinished
    assert_unharmed(generator, want)


def test_five_threads_on_one_generator(model: Any, want: list[list[int]]) -> None:
    """Some with generate(), some with streams of their own, one that fails all the time, and several at once
    in a batch."""
    generator, wrong, most = engine(model, steps_per_launch=2), [], [0]

    def work(number: int) -> None:
        try:
            for turn in range(4):
                i = (number + turn) % 4
                if number == 0:
                    with pytest.raises(ArgumentError):
                        generator.submit([1000])
                elif number % 2:
                    assert tokens_of(generator.generate([PROMPTS[i]], EACH[i])) == [want[i]]
                else:
                    request = generator.submit(PROMPTS[i], EACH[i])
                    assert [event.token_id for event in generator.stream([request])] == want[i]
                most[0] = max(most[0], len(generator.scheduler.running))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    assert_unharmed(generator, want)


def test_a_thread_that_was_interrupted_while_it_waited_is_not_waited_for(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a call that waits for its turn: no call gives way to it any more, which would slow all
    later steps."""

    class Interrupted:
        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None:
            raise AssertionError("never entered")

        def _is_owned(self) -> bool:
            return False

    generator = engine(model)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(generator._calls.lock, "_lock", Interrupted())
        generator.step()
    naps: list[float] = []
    monkeypatch.setattr("torchpaged.engine.call_lock.time.sleep", naps.append)
    other = threading.Thread(target=generator.generate, args=(PROMPTS[:1], EACH[0]))
    other.start()
    other.join(100)
    assert generator.stats.new_tokens
    assert not naps


def test_a_callback_that_calls_the_generator_is_refused(model: Any, want: list[list[int]]) -> None:
    """Not a deadlock."""
    generator = engine(model)
    model.fault = lambda call: generator.submit([5]) and None
    with pytest.raises(TorchpagedError, match="inside one of its own steps"):
        generator.generate(PROMPTS, EACH)
    assert_unharmed(generator, want)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"]
)
def test_a_generator_is_not_copied(model: Any, copied: Any) -> None:
    with pytest.raises(NotCopyableError, match="a Generator can't be copied or pickled"):
        copied(engine(model))


# ----------------------------------------------------------------------------------------- anything, anywhere
class Interrupt:
    """SIGINT at the n-th line that runs in the engine's own files; n = 0 only counts."""

    def __init__(self, at: int = 0, files: tuple[str, ...] = OF_THE_ENGINE) -> None:
        self.at, self.lines, self.where, self._files, self._before = at, 0, "", files, sys.gettrace()

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        # Python lets a signal in after a call, where a function begins and where a loop turns: not at a bare
        # `try`, nor where a `with` ends
        if event == "line" and not linecache.getline(
            frame.f_code.co_filename, frame.f_lineno
        ).strip().startswith(("try:", "with ")):
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self._trace

    def __enter__(self) -> Interrupt:
        # a process that runs tests may ignore it
        self._handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._before)
        signal.signal(signal.SIGINT, self._handler)


def by_generate(generator: Generator) -> None:
    generator.generate(PROMPTS, EACH)


def by_stream(generator: Generator) -> None:
    ids = [generator.submit(prompt, params) for prompt, params in zip(PROMPTS, EACH, strict=True)]
    for count, event in enumerate(generator.stream()):
        if count == 7 and event.request_id != ids[2]:
            generator.cancel(ids[2])


def test_events_of_a_step_interrupted_while_it_hands_them_out_come_with_the_next(
    model: Any, want: list[list[int]]
) -> None:
    """Ctrl-C at every line between the step's work and its return, `Inbox` and lock included."""
    lost, points = [], 0
    generator = engine(model, graphs=False)
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
    model: Any, want: list[list[int]]
) -> None:
    """Ctrl-C at every line of stream(ids): its requests are cancelled, or still belong to all."""
    generator, points = engine(model, graphs=False), 0
    files = CALL_FILES
    while True:
        ids = [generator.submit(prompt, params) for prompt, params in zip(PROMPTS, EACH, strict=True)]
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
    model: Any, want: list[list[int]], options: dict[str, Any], seed: int
) -> None:
    """One engine, one mishap after another; after each it serves as a new one does."""
    rng, generator = random.Random(seed), engine(model, **options)
    work = [by_generate, by_stream]
    lines = []
    for run in work:
        run(generator)  # with all that is known of the prompts, a run has the fewest lines
        with Interrupt() as count:
            run(generator)
        lines.append(count.lines)
    assert min(lines) > 500
    for _ in range(10):
        which, kind = (
            rng.randrange(2),
            rng.choice(["line", "line", "line", "forward", "forward interrupted", "nan", "left"]),
        )
        run, model.calls, at = work[which], 0, rng.randint(1, 12)
        if kind == "line":
            with pytest.raises(KeyboardInterrupt), Interrupt(rng.randint(1, lines[which] - 50)):
                run(generator)
        elif kind == "left":
            for prompt, params in zip(PROMPTS, EACH, strict=True):
                generator.submit(prompt, params)
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

            model.fault = fault
            if error is not KeyboardInterrupt:  # one that comes once is not raised
                run(generator)
            else:
                with pytest.raises(error):
                    run(generator)
        if generator.has_unfinished:  # requests that were submitted before a stream began: no call left them
            assert kind == "line"
            assert run is by_stream
            model.fault = lambda call: None
            for _ in generator.stream():
                pass
        assert_unharmed(generator, want)
