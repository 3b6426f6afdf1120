"""Whose requests are whose: streams, steps and threads of one generator, left, suspended or interrupted."""

import dataclasses
import gc
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from engine_requests import EACH, ENGINES, PROMPTS, Letters, assert_unharmed, engine, submit_all, tokens_of
from many_threads import in_threads

from torchpaged import ArgumentError
from torchpaged.custom_ops.errors import TorchpagedError
from torchpaged.engine import Generator
from torchpaged.engine.call_lock import CallLock

pytestmark = pytest.mark.timeout(300)  # a hang is a failure


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_generate_inside_an_open_stream(faulty: Any, want: list[list[int]], options: dict[str, Any]) -> None:
    generator = engine(faulty, **options)
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


def test_a_stream_that_is_left_cancels_its_requests(faulty: Any, want: list[list[int]]) -> None:
    generator = engine(faulty)
    submit_all(generator)
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
    faulty: Any, want: list[list[int]], options: dict[str, Any], held: int, how: str
) -> None:
    """A stream over all gives ``held`` events and waits; its other events of the same step, ends included,
    are the next call's."""
    generator, which = engine(faulty, **options), (0, 2, 3)
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
    faulty: Any, want: list[list[int]], options: dict[str, Any]
) -> None:
    """Whether its owner has its last event or not: it may have ended in the launch whose first event has just
    come."""
    generator = engine(faulty, **options)
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


def test_a_stream_and_steps_of_two_threads_give_each_event_once(faulty: Any, want: list[list[int]]) -> None:
    """One thread streams over all, two others step: the first to come has an event, and no other."""
    generator = engine(faulty, steps_per_launch=3)
    seen: dict[int, list[int | None]] = {}
    ids = [generator.submit(PROMPTS[i], EACH[i]) for i in (0, 1, 2, 3) * 6]

    def take(events: Any) -> None:
        for event in events:
            seen.setdefault(event.request_id, []).append(event.token_id)

    def steps() -> None:
        while generator.has_unfinished:
            take(generator.step())

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads([steps, steps, lambda: take(generator.stream())])
    finally:
        sys.setswitchinterval(before)
    assert {request: sorted(tokens) for request, tokens in seen.items()} == {  # type: ignore[type-var]
        request: sorted(want[i]) for request, i in zip(ids, (0, 1, 2, 3) * 6, strict=True)
    }
    assert_unharmed(generator, want)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_submit_that_breaks_off_leaves_no_event(
    faulty: Any, want: list[list[int]], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No caller has the request's id, so that none is told that it was cancelled."""
    generator = Generator(faulty, max_batch_size=2, max_seq_len=64, prefill_chunk_size=16, graphs=graphs)
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


def test_a_stream_that_is_never_begun_cancels_its_requests(faulty: Any, want: list[list[int]]) -> None:
    """They belong to it: no other call would give their events, and they would run on, and hold their blocks,
    in later calls."""
    generator = engine(faulty)
    ids = [generator.submit(prompt, params) for prompt, params in zip(PROMPTS[:2], EACH, strict=False)]
    kept = generator.stream([ids[1]])
    generator.stream([ids[0]])
    gc.collect()
    assert [event.token_id for event in kept] == want[1]
    assert not generator.has_unfinished
    assert_unharmed(generator, want)


@pytest.mark.parametrize("place", ["behind acquire", "ahead of release"])
def test_a_stream_collected_as_garbage_while_the_lock_changes_hands(
    faulty: Any, want: list[list[int]], place: str
) -> None:
    """The collector may run at any call, between the lock and the note of who holds it too: its thread must
    not wait for itself."""
    generator, left = engine(faulty), []

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
    other.join(100)
    assert left, "it waits for the lock that it holds"
    assert not other.is_alive(), "it waits for the lock that it holds"
    assert_unharmed(generator, want)


def test_a_request_submitted_while_a_stream_breaks_off_has_an_owner(
    faulty: Any, want: list[list[int]]
) -> None:
    """The submitting thread is inside, its request not queued yet, when a stream over all requests is closed
    and waits for the lock."""
    generator, inside, closing, ids = engine(faulty), threading.Event(), threading.Event(), []

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


def test_five_threads_on_one_generator(faulty: Any, want: list[list[int]]) -> None:
    """Some with generate(), some with streams of their own, one that fails all the time, and several at once
    in a batch."""
    generator = engine(faulty, steps_per_launch=2)

    def work(number: int) -> None:
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

    in_threads([partial(work, number) for number in range(5)])
    assert_unharmed(generator, want)


def test_a_thread_that_was_interrupted_while_it_waited_is_not_waited_for(
    faulty: Any, monkeypatch: pytest.MonkeyPatch
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

    generator = engine(faulty)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(generator._calls.lock, "_lock", Interrupted())
        generator.step()
    naps: list[float] = []
    monkeypatch.setattr("torchpaged.engine.call_lock.time", SimpleNamespace(sleep=naps.append))
    other = threading.Thread(target=generator.generate, args=(PROMPTS[:1], EACH[0]))
    other.start()
    other.join(100)
    assert generator.stats.new_tokens
    assert not naps
