"""BackgroundLoop: one thread that makes the steps of a `Generator` in place of its calls.

    calls.background = BackgroundLoop(calls, device)
    for event in calls.background.follow(inbox): ...            # in any thread
    async for event in calls.background.events(queue, owner): ...

It is one more caller: it enters as the others do, and gives way to those that wait. A caller that wants
events registers a `_Follower` of its inbox. Whenever a call is over, of any thread, the events since then are
delivered (`BackgroundLoop.deliver`): reading events needs no lock, and waits for no step.

What a step raises is no error of a request, which ends that request (`Stepper.step`): it is raised in
all callers that wait and ends all requests, and the loop goes on with the next ones. An error of that ends
the loop; calls make their own steps then.
"""

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeAlias

import torch

from torchpaged.custom_ops.errors import ClosedError, TorchpagedError
from torchpaged.engine.calls import Calls
from torchpaged.engine.hand_out import HandOut
from torchpaged.engine.outputs import TokenEvent
from torchpaged.engine.sequence import Inbox

#: Events, and whether more will follow; or what ended the loop, or a step.
_News: TypeAlias = "tuple[list[TokenEvent], bool] | BaseException"

_RUNNING: "weakref.WeakSet[BackgroundLoop]" = weakref.WeakSet()
# A thread that the interpreter ends in the middle of a step may take the process down; a step that hangs must
# not keep it.
_LAST_STEP_SECONDS = 10.0
# A wait ends for a signal only if it comes within the system call: one right before it, or
# `_thread.interrupt_main`, is seen when the wait is over. So no wait is longer than this.
_SIGNAL_SECONDS = 0.5


class _Follower(NamedTuple):
    """A caller that waits for an inbox.

    Attributes:
        put: takes news, from any thread, and never blocks.
        wants_events: False: only to know that all its requests have ended.
    """

    put: Callable[[_News], object]
    wants_events: bool


class BackgroundLoop:
    """The thread, which runs from now on.

    Args:
        calls: of the generator.
        device: of its model; on a GPU the steps run on this thread's current stream of it.

    Attributes:
        process: where the thread is.
    """

    def __init__(self, calls: Calls, device: torch.device) -> None:
        self._calls, self._stopping, self.process = calls, False, os.getpid()
        self._followers: dict[Inbox, _Follower] = {}
        # A token for each call that left requests to move. The collector may close a stream anywhere, which
        # is such a call: of what `queue` and `threading` have, only this may be entered again by its thread.
        self._work: SimpleQueue[None] = SimpleQueue()
        self._on_stream: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        if device.type == "cuda":
            self._on_stream = partial(torch.cuda.stream, torch.cuda.current_stream(device))
        self._thread = threading.Thread(target=self._run, name="torchpaged steps", daemon=True)
        self._thread.start()
        _RUNNING.add(self)

    # ------------------------------------------------------------------------------------------- the thread
    def _run(self) -> None:
        reason: BaseException = ClosedError(
            "the background loop was stopped: its Generator was dropped, or the interpreter ends"
        )
        try:
            with self._on_stream():
                while self._wait():
                    with self._calls.entered():
                        self._step()
                    self._calls.lock.give_way()
        except BaseException as error:
            reason = error
        with self._calls.held():
            self.end(reason)

    def _wait(self) -> bool:
        """Until there may be something to do; False: the loop is to end."""
        self._work.get()
        while not self._work.empty():
            self._work.get()
        return not self._stopping

    def _step(self) -> None:
        stepper = self._calls.stepper
        if not stepper.requests:
            return
        try:
            stepper.step()
        except BaseException as error:
            self._raise_in_all(error)
            try:
                stepper.fail_all(f"a step raised {type(error).__name__}: {error}")
            except BaseException as another:
                self.end(another)

    def _raise_in_all(self, error: BaseException) -> None:
        for follower in self._followers.values():
            _put(follower, error)
        self._followers = {}

    def stop(self) -> None:
        """End the thread behind its step."""
        self._stopping = True
        self._work.put(None)

    def end(self, reason: BaseException) -> None:
        """The same, and callers waiting for requests that have not ended get ``reason``; calls make their own
        steps. The caller holds the lock."""
        self.stop()
        if self._calls.background is self:
            self._calls.background = None
        self.deliver()
        self._raise_in_all(reason)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, so many seconds at most."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    # --------------------------------------------------------------------------------- what callers wait for
    def deliver(self) -> None:
        """Give all waiting callers the events so far; wake the thread if there are requests. The caller holds
        the lock."""
        for inbox, follower in list(self._followers.items()):
            more = bool(inbox.live)
            if more and not (follower.wants_events and inbox.ready):
                continue
            events = HandOut(inbox).take() if follower.wants_events else []
            told = (more and not events) or _put(follower, (events, more))
            if not told:
                self._calls.leave(inbox)
            if not more or not told:
                del self._followers[inbox]  # last: delivered again if Ctrl-C comes twice
        if not self._stopping and not self._calls.closed and self._calls.stepper.requests:
            self._work.put(None)

    def _add(self, inbox: Inbox, follower: _Follower, take: Callable[[Inbox], object] | None = None) -> None:
        """From now on ``follower`` gets the news of ``inbox``, beginning with what waits there.

        Args:
            take: called first, with the lock held: makes it the owner of a request.

        Raises:
            ArgumentError: of ``take``.
            ClosedError, TorchpagedError: the loop has ended, and requests have not.
        """
        with self._calls.entered(if_closed=take is None):
            if take is not None:
                take(inbox)
            self._register(inbox, follower)

    def _register(self, inbox: Inbox, follower: _Follower) -> None:
        """As `_add`, of requests that have their owner; the caller holds the lock."""
        if self._stopping and inbox.live:
            self._calls.require_open()
            raise TorchpagedError("the background loop has ended, by an error; start() it again")
        self._followers[inbox] = follower
        self.deliver()

    def follow(self, inbox: Inbox) -> Iterator[TokenEvent]:
        """Events of ``inbox`` until its requests have ended.

        Raises:
            TorchpagedError: a step raised; `__cause__` is its error.
        """
        news: SimpleQueue[_News] = SimpleQueue()
        self._add(inbox, _Follower(news.put, True))
        more = True
        while more:
            self._calls.require_own_process()  # a stream that was open at a fork
            events, more = _next(news)
            yield from events

    def waiter(self, inbox: Inbox) -> Callable[[], object]:
        """What waits until the requests of ``inbox`` have ended, and raises as `follow`. The caller holds the
        lock: a step that raises as soon as it is free is one of those that are waited for."""
        news: SimpleQueue[_News] = SimpleQueue()
        self._register(inbox, _Follower(news.put, False))
        return lambda: _next(news)

    async def events(
        self, taker: Callable[[], Callable[[Inbox], object]], owner: object
    ) -> AsyncIterator[TokenEvent]:
        """Events of the request that what ``taker`` gives, in a thread, gives an inbox, with the lock held;
        it is cancelled if the iteration breaks off. Raises as both and `follow`. ``owner`` as in
        `Calls.stream`."""
        here, inbox = asyncio.get_running_loop(), Inbox()
        news: asyncio.Queue[_News] = asyncio.Queue()
        follower = _Follower(lambda item: here.call_soon_threadsafe(news.put_nowait, item), True)
        # In a thread of its own: the lock may be held by a step.
        claim = here.run_in_executor(None, lambda: self._add(inbox, follower, taker()))
        # asyncio logs an error that is not asked for, as that of a call whose task was cancelled; so does
        # asyncio.shield from Python 3.14 on.
        claim.add_done_callback(asyncio.Future.exception)
        try:
            await asyncio.wait([claim])  # a cancelled wait leaves it as it is
            claim.result()
            more = True
            while more:
                events, more = _read(await news.get())
                for event in events:
                    yield event
            inbox.forget()
        except BaseException:
            if claim.done():
                self._leave(inbox)
            else:
                claim.add_done_callback(lambda _: self._leave(inbox))
            raise

    def _leave(self, inbox: Inbox) -> None:
        """Have the thread cancel what belongs to ``inbox``: a caller that left must not wait for its step."""
        self._calls.leave(inbox, now=False)
        self._work.put(None)


def _put(follower: _Follower, news: _News) -> bool:
    """False: its event loop is closed."""
    try:
        follower.put(news)
    except RuntimeError:
        return False
    return True


def _next(waiting: SimpleQueue[_News]) -> tuple[list[TokenEvent], bool]:
    while True:
        with contextlib.suppress(Empty):
            return _read(waiting.get(timeout=_SIGNAL_SECONDS))


def _read(news: _News) -> tuple[list[TokenEvent], bool]:
    if isinstance(news, ClosedError):
        raise ClosedError(*news.args)
    if isinstance(news, BaseException):
        # One of its own for each waiting caller: a traceback grows where it is raised.
        raise TorchpagedError(
            f"a step of the background loop raised {type(news).__name__}: {news}; its requests are lost, "
            "others may be submitted"
        ) from news
    return news


@atexit.register
def _stop_all() -> None:
    running = list(_RUNNING)
    for loop in running:
        loop.stop()
    for loop in running:
        loop.join(_LAST_STEP_SECONDS)
