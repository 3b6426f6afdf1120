"""`Generator.start`: a thread of its own makes the steps. Tokens are those of each request alone, an error
reaches all who wait, and nothing ever hangs."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import functools
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_requests import EACH, LONG, PROMPTS, Letters
from engine_requests import ENGINES as WAYS
from forked import said_in_a_child
from many_threads import in_threads, random_requests, run_threads

from torchpaged import ArgumentError, ClosedError, TorchpagedError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.engine.calls import NUM_UNREAD, Calls
from torchpaged.engine.sequence import Inbox

pytestmark = pytest.mark.timeout(300)  # a hang is a failure
ENGINES = {**WAYS, "few blocks": {"num_blocks": 20}}


def engine(llama: Any, **options: Any) -> Generator:
    shape = {"max_batch_size": 3, "max_seq_len": 64, "block_size": 4, "prefill_chunk_size": 16}
    return Generator(llama, **{**shape, "compile": False, **options})


@pytest.fixture(scope="module")
def want(llama: Any) -> list[list[int]]:
    """Tokens of each request alone."""
    with engine(llama, graphs=False) as generator:
        return [generator.generate([p], params)[0].token_ids for p, params in zip(PROMPTS, EACH, strict=True)]


@pytest.fixture
def started(llama: Any) -> Iterator[Generator]:
    with engine(llama) as generator:
        yield generator.start()


class Fault:
    """A forward hook that raises at the calls that ``at`` names, or runs something."""

    def __init__(self, model: Any, does: Callable[[int], None]) -> None:
        self.calls, self._does = 0, does
        self._hook = model.register_forward_pre_hook(self._run)

    def _run(self, *_: Any) -> None:
        self.calls += 1
        self._does(self.calls)

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, *_: Any) -> None:
        self._hook.remove()


def tokens_of(events: Any) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def test_start_again_is_no_error_and_step_is_refused(started: Generator, want: list[list[int]]) -> None:
    assert started.start() is started
    with pytest.raises(TorchpagedError, match=r"step\(\): the background loop makes the steps"):
        started.step()
    assert [output.token_ids for output in started.generate(PROMPTS, EACH)] == want
    ids = [started.submit(prompt, params) for prompt, params in zip(PROMPTS, EACH, strict=True)]
    found: dict[int, list[int]] = {request: [] for request in ids}
    for event in started.stream():
        found[event.request_id].append(event.token_id)
    assert list(found.values()) == want
    assert started.pool.num_used == 0


def test_requests_go_on_without_a_waiter(started: Generator, want: list[list[int]]) -> None:
    request = started.submit(PROMPTS[2], EACH[2])
    while not started.metrics().finished:
        time.sleep(0.001)
    started.cancel(request)  # it has ended: no error
    assert tokens_of(started.stream([request])) == want[2]
    with pytest.raises(ArgumentError, match="request_id"):
        started.cancel(10_000)


def test_a_stream_that_began_before_the_start(llama: Any, want: list[list[int]]) -> None:
    with engine(llama) as generator:
        stream = generator.stream([generator.submit(PROMPTS[2], EACH[2])])
        begun = [next(stream), next(stream)]
        generator.start()
        assert tokens_of([*begun, *stream]) == want[2]


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_eight_threads_submit_and_cancel_at_random(
    llama: Any, want: list[list[int]], options: dict[str, Any]
) -> None:
    requests = list(zip(PROMPTS, EACH, strict=True))
    with engine(llama, **options).start() as generator:
        assert run_threads(generator, requests, want, threads=8, turns=12)["tokens"]
        assert [output.token_ids for output in generator.generate(PROMPTS, EACH)] == want


@pytest.mark.long
@pytest.mark.slow
def test_thirty_two_threads(llama: Any) -> None:
    """Common beginnings, and too few blocks for all that run."""
    requests = random_requests(0, 24)
    with engine(llama, graphs=False, max_seq_len=96) as one:
        want = [one.generate([prompt], params)[0].token_ids for prompt, params in requests]
    shape = {"max_batch_size": 16, "max_seq_len": 96, "num_blocks": 90, "steps_per_launch": 2}
    with engine(llama, **shape).start() as generator:
        run_threads(generator, requests, want, threads=32, seconds=20)
        assert generator.stats.preemptions
        assert generator.stats.mixed_steps
        assert generator.stats.shared_tokens


# ----------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize("error", [KeyboardInterrupt("boom"), SystemExit(3)], ids=["interrupt", "exit"])
def test_an_end_of_the_process_in_a_step_reaches_all_who_wait(
    llama: Any, want: list[list[int]], error: BaseException
) -> None:
    """Four callers of three kinds, at a step at which all of them wait and which has a request that none
    waits for: that one says so when it is asked."""
    with engine(llama, graphs=False, max_batch_size=8).start() as generator:
        background, raised = generator._calls.background, threading.Event()
        assert background is not None

        def fail(call: int) -> None:
            time.sleep(0.002)
            alone = generator._calls.inbox.live
            if len(background._followers) == 4 and alone and not raised.is_set():
                raised.set()
                raise error

        def waits(call: Callable[[int], object]) -> None:
            with pytest.raises(TorchpagedError, match="a step of the background loop raised") as caught:
                while not raised.is_set():  # until the others wait, too
                    call(generator.submit([1, 2, 3], LONG))
            assert caught.value.__cause__ is error

        async def listens(request: int) -> None:
            async for _event in generator.events(request):
                pass

        calls: list[Callable[[int], object]] = [
            lambda request: list(generator.stream([request])),
            lambda request: list(generator.stream([request])),
            lambda request: generator.generate([PROMPTS[1]] * 2, LONG) and generator.cancel(request),
            lambda request: asyncio.run(listens(request)),
        ]
        with Fault(llama, fail):
            in_threads([lambda call=call: waits(call) for call in calls])  # type: ignore[misc]
        ends = {event.request_id: event for event in generator.stream() if event.finish_reason == "error"}
        assert ends, "that of the caller of generate()"
        assert all(str(error) in str(event.error) for event in ends.values())
        assert generator.pool.num_used == 0
        assert [output.token_ids for output in generator.generate(PROMPTS, EACH)] == want


def test_a_step_that_raises_before_its_caller_waits(llama: Any, want: list[list[int]]) -> None:
    """As soon as the lock is free behind the submission: generate() raises it all the same."""
    raised, caller = threading.Event(), threading.current_thread()

    def fail(call: int) -> None:
        if not raised.is_set():
            raised.set()
            raise SystemExit("boom")

    with engine(llama, graphs=False).start() as generator, Fault(llama, fail):
        entered = generator._calls.entered

        @contextlib.contextmanager
        def late(**options: Any) -> Iterator[None]:
            with entered(**options):
                yield
            assert threading.current_thread() is not caller or raised.wait(60)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generator._calls, "entered", late)
            with pytest.raises(TorchpagedError, match="boom"):
                generator.generate(PROMPTS, EACH)
        assert [output.token_ids for output in generator.generate(PROMPTS, EACH)] == want


def test_errors_at_random_steps_hang_no_caller(llama: Any, want: list[list[int]]) -> None:
    draw, lock = random.Random(0), threading.Lock()

    def fail(call: int) -> None:
        with lock:
            if draw.random() < 0.1:
                raise RuntimeError("boom")

    with engine(llama, graphs=False).start() as generator:

        def work(number: int) -> None:
            for turn in range(6):
                i = (number + turn) % 4
                try:
                    [output] = generator.generate([PROMPTS[i]], EACH[i])
                except TorchpagedError as error:
                    assert "boom" in str(error)
                else:
                    assert output.token_ids == want[i] or output.finish_reason == "error"

        with Fault(llama, fail):
            in_threads([lambda n=n: work(n) for n in range(6)])  # type: ignore[misc]
        assert [output.token_ids for output in generator.generate(PROMPTS, EACH)] == want


def test_an_error_that_no_request_is_about_is_raised_by_all(llama: Any, want: list[list[int]]) -> None:
    """Two callers with twelve requests; then the loop goes on."""
    with engine(llama, graphs=False).start() as generator, pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator.scheduler, "schedule", lambda asked: 1 // 0)

        def waits() -> None:
            with pytest.raises(TorchpagedError, match="ZeroDivisionError") as caught:
                generator.generate(PROMPTS * 2, EACH * 2)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)

        in_threads([waits, waits])
        patch.undo()
        assert [output.token_ids for output in generator.generate(PROMPTS, EACH)] == want


def test_a_loop_that_can_not_repair_a_step_ends(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits learns of it, later calls make their own steps, and `start` works again."""

    def fail(call: int) -> None:
        raise SystemExit("boom")

    with engine(llama, graphs=False).start() as generator:
        with monkeypatch.context() as patch, Fault(llama, fail):
            patch.setattr(generator._stepper, "fail_all", lambda reason: 1 // 0)
            with pytest.raises(TorchpagedError, match="boom"):
                generator.generate([PROMPTS[0]], LONG)
        background = generator._calls.background
        if background is not None:
            background.join(60)
        assert generator._calls.background is None
        assert len(generator.generate([PROMPTS[0]], LONG)[0].token_ids) == 50
        assert len(generator.start().generate([PROMPTS[0]], LONG)[0].token_ids) == 50


def kill(caller: int) -> None:
    signal.pthread_kill(caller, signal.SIGINT)


def note(caller: int) -> None:
    """As a signal right before the wait: it ends no system call."""
    _thread.interrupt_main()


@pytest.mark.parametrize("interrupt", [kill, note])
def test_ctrl_c_in_a_caller_leaves_the_loop_running(
    llama: Any, want: list[list[int]], interrupt: Callable[[int], None]
) -> None:
    """It comes in the middle of a step, while the caller waits for requests that have not begun."""
    before, caller = signal.signal(signal.SIGINT, signal.default_int_handler), threading.get_ident()
    try:
        with engine(llama, graphs=False).start() as generator:
            other, calls = generator.submit(PROMPTS[2], EACH[2]), generator._calls
            background = calls.background
            assert background is not None
            left = []

            def in_a_step(call: int) -> None:
                if background._followers and generator.scheduler.waiting and not left:
                    interrupt(caller)
                    for _ in range(6000):  # the requests have not ended when the caller leaves them
                        if calls._left:
                            left.append(call)
                            break
                        time.sleep(0.01)

            with Fault(llama, in_a_step), pytest.raises(KeyboardInterrupt):
                while True:
                    generator.generate([PROMPTS[1]] * 8, LONG)
            assert tokens_of(generator.stream([other])) == want[2]
            assert left
            assert not generator.has_unfinished
            assert "cancelled" in generator.stats.finished
    finally:
        signal.signal(signal.SIGINT, before)


# --------------------------------------------------------------------------------------------- the loop's end
def test_close_in_the_middle_of_streams(llama: Any) -> None:
    others, begun = set(threading.enumerate()), threading.Barrier(5)
    generator = engine(llama).start()
    reasons: list[str | None] = []

    def reads() -> None:
        stream = generator.stream([generator.submit(PROMPTS[0], LONG)])
        first = next(stream)
        begun.wait(60)
        reasons.append([first, *stream][-1].finish_reason)

    def closes() -> None:
        begun.wait(60)
        generator.close()

    in_threads([reads, reads, reads, reads, closes])
    assert len(reasons) == 4
    assert set(reasons) <= {"cancelled", "length"}
    with pytest.raises(ClosedError):
        generator.submit(PROMPTS[0])
    assert "torchpaged steps" not in {thread.name for thread in set(threading.enumerate()) - others}


def test_a_loop_that_ends_between_two_looks_at_it(started: Generator) -> None:
    """Of a call that has no lock yet: under a tracer, and where Python has none itself."""

    class Ends(Calls):
        background = property(lambda self: vars(self).pop("loop", None))  # type: ignore[assignment]

    calls, loop = started._calls, started._calls.background
    for look in (lambda: calls._forked_from(), lambda: list(calls._events(Inbox()))):
        vars(calls)["loop"], calls.__class__ = loop, Ends
        try:
            assert not look()
        finally:
            calls.__class__ = Calls


def test_a_generator_that_is_dropped_ends_its_thread_behind_its_streams(
    llama: Any, want: list[list[int]]
) -> None:
    """An open stream, begun or not, and an iteration of asyncio get all their events; then it ends."""
    generator = engine(llama).start()
    begun, fresh = (generator.stream([generator.submit(PROMPTS[i], EACH[i])]) for i in (0, 1))
    events = generator.events(generator.submit(PROMPTS[2], EACH[2]))
    tokens = [next(begun).token_id]
    background = generator._calls.background
    assert background is not None
    del generator
    gc.collect()

    async def rest(iteration: Any) -> list[int]:
        return tokens_of([event async for event in iteration])

    assert tokens + tokens_of(begun) == want[0]
    assert tokens_of(fresh) == want[1]
    assert asyncio.run(rest(events)) == want[2]
    del events
    background.join(60)
    assert not background._thread.is_alive()  # type: ignore[attr-defined]
    llama.set_attn_implementation("eager")


CALLS_IN_A_CHILD: dict[str, Callable[[Generator, Iterator[Any], int], Any]] = {
    "submit": lambda generator, stream, request: generator.submit([5]),
    "generate": lambda generator, stream, request: generator.generate([[5]]),
    "cancel": lambda generator, stream, request: generator.cancel(request),
    "stream": lambda generator, stream, request: generator.stream([request]),
    "stream of all": lambda generator, stream, request: next(iter(generator.stream())),
    "an open stream": lambda generator, stream, request: list(stream),
    "events": lambda generator, stream, request: asyncio.run(anext(generator.events(request))),
    "start": lambda generator, stream, request: generator.start(),
    "metrics": lambda generator, stream, request: generator.metrics(),
    "close": lambda generator, stream, request: generator.close(),
}


def test_a_forked_process_is_refused_by_name(llama: Any, want: list[list[int]]) -> None:
    """Its copy of the loop has no thread. Forked in the middle of a step, when the lock is held."""
    stepping, forked = threading.Event(), threading.Event()

    def hold(call: int) -> None:
        stepping.set()
        forked.wait(60)

    with engine(llama, graphs=False) as generator, Fault(llama, hold):
        open_request, request = (generator.submit(PROMPTS[0], EACH[0]) for _ in range(2))
        stream = generator.stream([open_request])
        generator.start()
        assert stepping.wait(60)
        calls = {
            name: functools.partial(call, generator, stream, request)
            for name, call in CALLS_IN_A_CHILD.items()
        }
        said = said_in_a_child(calls, forked.set)
        for name, text in said.items():
            assert re.match(rf"TorchpagedError: .*start\(\).*process {os.getpid()}.*fork", text), (name, text)
        assert tokens_of(stream) == want[0]
        assert tokens_of(generator.stream([request])) == want[0]


@pytest.mark.parametrize("background", [True, False])
def test_what_was_cancelled_and_is_not_read_is_given_up(
    llama: Any, want: list[list[int]], background: bool
) -> None:
    """The latest are kept, and those that were not cancelled, until somebody reads them."""
    with engine(llama, graphs=False) as generator:
        kept = generator.submit(PROMPTS[2], EACH[2])
        generator.generate([PROMPTS[0]], LONG)  # the other one ends meanwhile
        if background:
            generator.start()
        first = None
        for _ in range(NUM_UNREAD + 50):
            request = generator.submit(PROMPTS[0], LONG)
            first = request if first is None else first
            generator.cancel(request)
        assert len(generator._calls.inbox.ready) == NUM_UNREAD + 1
        with pytest.raises(ArgumentError, match="request_ids"):
            generator.stream([first])
        reason = [event.finish_reason for event in generator.stream([request])][-1]
        assert reason == "cancelled" or (background and reason == "length"), "the loop may have been faster"
        assert tokens_of(generator.stream([kept])) == want[2]
        assert generator.pool.num_used == 0


EXITS = {
    "idle": "",
    "in flight": "generator.submit([5, 6, 7], SamplingParams(max_new_tokens=200, ignore_eos=True))",
    "another thread waits": """
import threading
request = generator.submit([5, 6, 7], SamplingParams(max_new_tokens=50, ignore_eos=True))
def reads():
    assert len(list(generator.stream([request]))) == 50
    print("read", flush=True)
threading.Thread(target=reads).start()
""",
    "an exception": """
generator.submit([5, 6, 7], SamplingParams(max_new_tokens=200, ignore_eos=True))
raise SystemExit(0)
""",
}


@pytest.mark.slow_cases(but=("in flight", "another thread waits"))
@pytest.mark.parametrize("case", EXITS)
def test_an_interpreter_that_exits_without_close(case: str) -> None:
    program = f"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from torchpaged.engine import Generator, SamplingParams
heads = dict(num_hidden_layers=1, num_attention_heads=2, hidden_size=32, intermediate_size=32)
model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **heads)).eval()
generator = Generator(model, max_batch_size=2, max_seq_len=256, compile=False).start()
{EXITS[case]}
"""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("read" in done.stdout) == (case == "another thread waits")
    assert not done.stderr, done.stderr[-3000:]


# ---------------------------------------------------------------------------------------------------- asyncio
async def listen(generator: Generator, prompt: list[int], params: SamplingParams) -> list[int]:
    request = await asyncio.to_thread(generator.submit, prompt, params)
    return tokens_of([event async for event in generator.events(request)])


def test_tasks_wait_side_by_side(started: Generator, want: list[list[int]]) -> None:
    async def main() -> list[list[int]]:
        pairs = [*zip(PROMPTS, EACH, strict=True)] * 3
        return await asyncio.gather(*(listen(started, prompt, params) for prompt, params in pairs))

    assert asyncio.run(main()) == want * 3


def test_two_tasks_one_of_which_is_cancelled(started: Generator, want: list[list[int]]) -> None:
    async def cancels_itself() -> None:
        task, request = asyncio.current_task(), await asyncio.to_thread(started.submit, PROMPTS[0], LONG)
        assert task is not None
        async for _event in started.events(request):
            task.cancel()  # where it waits next

    async def main() -> list[int]:
        first = asyncio.create_task(cancels_itself())
        second = asyncio.create_task(listen(started, PROMPTS[2], EACH[2]))
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second

    assert asyncio.run(main()) == want[2]
    while started.has_unfinished:
        time.sleep(0.001)
    assert started.pool.num_used == 0


@pytest.mark.parametrize("prompt", [PROMPTS[0], [10_000]], ids=["queued", "refused"])
def test_a_task_that_is_cancelled_while_its_request_is_queued(
    started: Generator, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step, or another call, has the lock until then. What is refused is no error that asyncio logs. Steps
    do nothing: the request might come to its end before the event loop's thread runs again."""
    logged: list[dict[str, Any]] = []
    monkeypatch.delattr(asyncio, "shield")  # from Python 3.14 on it logs what is refused
    monkeypatch.setattr(started._stepper, "step", lambda: None)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: logged.append(what))
        with started._calls.entered():
            task = asyncio.create_task(anext(started.answer(prompt, LONG)))
            while not started._calls.lock._queue:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    while started.has_unfinished:
        time.sleep(0.001)
    assert started.stats.finished == ({"cancelled": 1} if prompt == PROMPTS[0] else {})
    assert started.pool.num_used == 0
    gc.collect()
    assert not logged


def test_an_answer_that_is_not_begun_leaves_no_request(started: Generator) -> None:
    started.answer(PROMPTS[0], LONG)
    assert not started.has_unfinished


class Meeting(Letters):
    """Reads two texts at a time."""

    def __init__(self) -> None:
        self.both = threading.Barrier(2)

    def __call__(self, text: str) -> dict[str, list[int]]:
        self.both.wait(60)
        return super().__call__(text)


@pytest.mark.parametrize("way", ["submit", "generate", "answer", "pin"])
def test_texts_are_read_beside_steps_and_each_other(started: Generator, way: str) -> None:
    """With no lock held: a long text takes as long as many steps."""
    started.tokenizer = Meeting()

    async def answered() -> None:
        async for _ in started.answer("hello", EACH[0]):
            pass

    calls: dict[str, Callable[[], object]] = {
        "submit": lambda: started.submit("hello"),
        "generate": lambda: started.generate("hello"),
        "answer": lambda: asyncio.run(answered()),
        "pin": lambda: started.pin("hello"),
    }
    in_threads([calls[way]] * 2)  # type: ignore[list-item]


def test_what_events_refuses(llama: Any) -> None:
    async def first(generator: Generator, request: int) -> Any:
        return await anext(generator.events(request))

    with engine(llama) as generator:
        with pytest.raises(TorchpagedError, match=r"call start\(\) first"):
            generator.events(0)
        generator.start()
        with pytest.raises(ArgumentError, match="request_ids"):
            asyncio.run(first(generator, 5))
        request = generator.submit(PROMPTS[0], LONG)
        stream = generator.stream([request])
        with pytest.raises(ArgumentError, match="belong to no other stream"):
            asyncio.run(first(generator, request))
        assert len(list(stream)) == 50


def test_an_event_loop_that_is_gone_harms_no_one(started: Generator, want: list[list[int]]) -> None:
    """Its request is cancelled at the next event, since its caller cannot be told."""
    here = asyncio.new_event_loop()
    request = started.submit(PROMPTS[0], LONG)
    events = started.events(request)
    here.run_until_complete(anext(events))
    here.close()
    while started.has_unfinished:
        time.sleep(0.001)
    assert started.stats.finished in ({"cancelled": 1}, {"length": 1})
    assert started.generate([PROMPTS[2]], EACH[2])[0].token_ids == want[2]
    del events


def test_close_ends_a_task_that_waits(llama: Any) -> None:
    generator = engine(llama).start()

    async def main() -> str | None:
        request, reason = generator.submit(PROMPTS[0], LONG), None
        async for event in generator.events(request):
            if event.token_id is not None and reason is None:
                await asyncio.to_thread(generator.close)
            reason = event.finish_reason or "open"
        return reason

    assert asyncio.run(main()) in ("cancelled", "length")
