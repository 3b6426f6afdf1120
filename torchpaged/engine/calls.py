"""Calls: one call at a time into one `Generator`, and whose requests are whose.

    calls = Calls(stepper)
    with calls.entered():           # no other thread is inside, and Ctrl-C waits
        stepper.step()
    calls.give_way()
    for event in calls.stream():
        ...

A call owns requests by an `Inbox`. A request's own `Sequence.log` holds its events; the inbox only says
where to look. So nothing is lost when a step breaks off, and no call takes events of another one's requests.
A call that breaks off cancels its requests (`leave`); where it can't at once, because the garbage collector
closed it in the middle of a step, the next call does.

A call that wants events makes steps itself. With a `BackgroundLoop` it waits for those of the loop's thread,
which is one more caller (`advance`, `_events`).
"""

from __future__ import annotations

# What `signal` wraps, without its search for members of an enumeration: 1.5 us a step for 17.
import _signal  # type: ignore[import-not-found]
import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Protocol

from torchpaged.custom_ops.errors import ArgumentError, ClosedError, TorchpagedError
from torchpaged.engine.outputs import TokenEvent
from torchpaged.engine.sequence import Inbox, Sequence
from torchpaged.engine.stepper import Stepper

#: Of requests that were cancelled and belong to no stream, so many keep what was not read.
NUM_UNREAD = 1024
# For threads that wait for the lock: without it the one that steps would take it again and again.
_GIVE_WAY_SECONDS = 1e-4
# Held while events are taken or change their owner, which a stream does with no other lock: it must not wait
# for another thread's step to give what it has.
_TAKING = threading.Lock()


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C within the block comes when the block is over; a second one at once, for a step that hangs or
    compiles for minutes. In other threads, which get no signals, and where SIGINT has no handler in Python:
    nothing."""
    handler = _signal.getsignal(signal.SIGINT)
    waiting: list[tuple[Any, ...]] = []
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return

    def note(*arrived: Any) -> None:
        if waiting:
            handler(*waiting.pop())
            handler(*arrived)
        else:
            waiting.append(arrived)

    try:
        _signal.signal(signal.SIGINT, note)
        yield
    finally:
        _signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(*waiting.pop())


class HandOut:
    """Events on their way to a caller, each request's in order. An event is taken when it is given, not when
    it is found: a stream may be suspended between two, and the other calls give what it has not given.

    Args:
        inbox: whose events; from inside.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._places = {sequence: (sequence.taken, len(sequence.log.rows)) for sequence in inbox.waiting}
        inbox.ready = dict.fromkeys(self._places)

    def _take(self, sequence: Sequence, first: int, end: int) -> bool:
        """Take events ``first`` to ``end``; False, and nothing is, if another call took some or owns them."""
        # Nothing is called in here, so that no signal and no garbage collector, which may close a stream and
        # wait for the lock of all calls, comes in.
        with _TAKING:
            mine = sequence.inbox is self._inbox and sequence.taken == first
            if mine:
                sequence.taken, sequence.taker = end, self
        return mine

    def __iter__(self) -> Iterator[TokenEvent]:
        """One by one, those that no other call has taken by then."""
        for sequence, (first, end) in self._places.items():
            for index in range(first, end):
                if not self._take(sequence, index, index + 1):
                    break
                yield sequence.log[index]

    def take(self) -> list[TokenEvent]:
        """All at once."""
        return [
            event
            for sequence, (first, end) in self._places.items()
            if self._take(sequence, first, end)
            for event in map(sequence.log.__getitem__, range(first, end))
        ]

    def give_back(self) -> None:
        """After an interrupt in or behind `take`: the next call of the requests' owner gets them, unless
        another thread has taken later ones of a request meanwhile. From inside."""
        for sequence, (first, end) in self._places.items():
            if sequence.taker is self and sequence.taken == end:
                sequence.inbox.ready[sequence] = None
                sequence.taken = first


class Background(Protocol):
    """Who makes the steps in a thread of its own: `torchpaged.engine.background.BackgroundLoop`.

    Attributes:
        process: where the thread is; a process forked from it has none.
    """

    process: int

    def deliver(self) -> None:
        """A call is over: give all who wait what has happened."""

    def follow(self, inbox: Inbox) -> Iterator[TokenEvent]:
        """Events until all requests of ``inbox`` have ended."""

    def wait(self, inbox: Inbox) -> None:
        """Until they have ended."""

    def events(self, request_id: int, owner: object) -> AsyncIterator[TokenEvent]:
        """Of one request, for asyncio."""

    def end(self, reason: BaseException) -> None:
        """No step follows; who waits gets ``reason``."""

    def join(self) -> None:
        """Wait for the thread's end."""


class Calls:
    """The calls into one generator, of any number of threads.

    Args:
        stepper: moves the requests of all of them.

    Attributes:
        inbox: of the submitted requests that belong to no stream over some of them. Another one after a
            stream over all of them broke off.
        stepper: as given; gone when it is closed.
        background: whose thread makes the steps; None: calls make them.
        closed: no call is let in any more.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.inbox = Inbox()
        self.background: Background | None = None
        self.closed = False
        self._lock = threading.RLock()
        self._holder = 0  # the thread that is inside: a little less long than it has the lock
        self._queue: dict[int, None] = {}  # threads that wait for the lock
        self._left: deque[list[Sequence] | Inbox] = deque()  # requests to be cancelled; of an inbox all
        self._cancelled: dict[Sequence, None] = {}  # the latest that no stream had
        self._stream_of_all: object | None = None  # the mark of the open stream over all requests

    # ------------------------------------------------------------------------------------- one call at a time
    @contextlib.contextmanager
    def entered(self, *, if_closed: bool = False) -> Iterator[None]:
        """Hold the lock, with nothing half done and no request left to be cancelled; Ctrl-C waits.

        Args:
            if_closed: also of a closed generator, whose requests have ended.

        Raises:
            ClosedError: the generator is closed.
            TorchpagedError: as `held`.
        """
        with self.held(), interrupts_wait():
            if not self.closed:
                self.stepper.reset()
                self._cancel_left()
            elif not if_closed:
                self.require_open()
            try:
                yield
            finally:
                if self.background is not None:
                    self.background.deliver()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock alone.

        The lock may be taken again by its thread: the garbage collector may close a stream between the lock
        and the note of its holder, where nothing is half done either.

        Raises:
            TorchpagedError: this thread is inside already, or as `require_own_process`.
        """
        self.require_own_process()
        if self._is_inside():
            raise TorchpagedError(
                "a Generator was called from inside one of its own steps (a callback of the model, "
                "tokenizer or progress)"
            )
        thread = threading.get_ident()
        self._queue[thread] = None
        try:
            with self._lock:
                self._queue.pop(thread, None)
                self._holder = thread
                try:
                    yield
                finally:
                    self._holder = 0
        finally:
            self._queue.pop(thread, None)  # interrupted while it waited

    def _is_inside(self) -> bool:
        # _is_owned is not public; threading.Condition relies on it. The note alone is not enough: Ctrl-C may
        # leave an old one behind.
        return bool(self._lock._is_owned()) and self._holder == threading.get_ident()  # type: ignore[attr-defined]

    def _is_forked(self) -> bool:
        return self.background is not None and self.background.process != os.getpid()

    def require_own_process(self) -> None:
        """Refuse a call in a process forked from that of the background loop, whose thread it has not; the
        lock may have been held when it was forked.

        Raises:
            TorchpagedError: it is.
        """
        if self.background is not None and self._is_forked():
            raise TorchpagedError(
                f"the background loop of this Generator runs in process {self.background.process}, which "
                f"called start(); this one, {os.getpid()}, was forked from it and has no such thread: make a "
                "Generator in each process, after the fork"
            )

    def give_way(self) -> None:
        """Between two steps of one call: let in a thread that waits."""
        if self._queue:
            time.sleep(_GIVE_WAY_SECONDS)

    # ------------------------------------------------------------------------------------------------ the end
    def require_open(self) -> None:
        """Refuse a call after `close`.

        Raises:
            ClosedError: it is closed.
        """
        if self.closed:
            raise ClosedError(
                "the Generator is closed: its pools and graphs are gone, and its model is as it was before; "
                "make a new Generator"
            )

    def require_no_background(self, call: str) -> None:
        """Refuse ``call``, which makes a step, while the background loop makes them."""
        if self.background is not None:
            raise TorchpagedError(
                f"{call}: the background loop makes the steps since start(); read events by "
                "stream(request_ids) or events(request_id)"
            )

    def close(self, free: Callable[[], None]) -> None:
        """Cancel all requests, let no call in from now on, and end the background loop; nothing if that was
        done before.

        Args:
            free: called under the lock, whatever is raised.
        """
        with self.held(), interrupts_wait():
            if self.closed:
                return
            self.closed, background = True, self.background
            try:
                self.stepper.reset()
                for request_id in list(self.stepper.requests):
                    self.stepper.cancel(request_id)
            finally:
                if background is not None:
                    background.end(ClosedError("the Generator was closed, and its last step is lost"))
                del self.stepper
                free()
        if background is not None:
            background.join()

    # ----------------------------------------------------------------------------------------- whose requests
    def claim(self, request_ids: list[int], inbox: Inbox) -> None:
        """Make ``inbox`` the owner of these submitted requests; from inside.

        Raises:
            ArgumentError: an id that is unknown, finished, or another stream's.
        """
        known = {s.request_id: s for s in (*self.inbox.live, *self.inbox.waiting)}
        for request_id in request_ids:
            if request_id not in known:
                raise ArgumentError(
                    "request_ids",
                    "submitted requests that are not done and belong to no other stream",
                    repr(request_id),
                )
        for sequence in (known[request_id] for request_id in request_ids):
            for old, new in ((self.inbox.live, inbox.live), (self.inbox.ready, inbox.ready)):
                if sequence in old:
                    new[sequence] = None
                    del old[sequence]
            with _TAKING:
                sequence.inbox = inbox

    def cancel(self, request_id: int) -> None:
        """End a request, if it has not ended. What no stream has and is not read is given up after
        `NUM_UNREAD` more of the kind; from inside."""
        sequence = self.stepper.requests.get(request_id)
        self.stepper.cancel(request_id)
        if sequence is None:
            sequence = next((s for s in self.inbox.ready if s.request_id == request_id), None)
        if sequence is None or sequence.inbox is not self.inbox:
            return
        self._cancelled[sequence] = None
        if len(self._cancelled) > NUM_UNREAD:
            oldest = next(iter(self._cancelled))
            self.inbox.ready.pop(oldest, None)  # it is a stream's now, or was read, if it isn't there
            del self._cancelled[oldest]

    def stream(self, request_ids: list[int] | None, owner: object) -> Iterator[TokenEvent]:
        """Step until requests are done, giving events as they come.

        Args:
            owner: kept until the stream is over: the Generator, whose background loop ends with it.
            request_ids: whose; they belong to it from the first ``next`` on, which gives nothing, and it
                cancels them if it is dropped: no other call will take their events. None: all submitted ones.

        Raises:
            ArgumentError: as `claim`.
            TorchpagedError: a second stream over all requests.
        """
        mark, inbox = object(), None
        try:
            with self.entered():
                if request_ids is not None:
                    inbox = Inbox()
                    self.claim(request_ids, inbox)
                elif self._stream_of_all is None:
                    self._stream_of_all, inbox = mark, self.inbox
                else:
                    raise TorchpagedError(
                        "stream(): another stream over all requests is open; close() it, or name the "
                        "requests: stream(request_ids)"
                    )
            if request_ids is not None:
                yield  # type: ignore[misc]
            while inbox.live or inbox.waiting:
                yield from self._events(inbox)
        except BaseException:
            if inbox is not None:
                self.leave(inbox)
            raise
        finally:
            if self._stream_of_all is mark:
                self._stream_of_all = None

    def _events(self, inbox: Inbox) -> Iterable[TokenEvent]:
        """Those that ``inbox`` has, or else gets by a step; of a background loop all to come."""
        if self.background is not None:
            return self.background.follow(inbox)
        with self.entered(if_closed=True):
            if not inbox.waiting:
                self.require_open()
                self.stepper.step()
            handed = HandOut(inbox)
        self.give_way()
        return handed

    def advance(self, inbox: Inbox) -> None:
        """One step, unless another thread has ended all requests of ``inbox``; a background loop does them
        all."""
        if self.background is not None:
            return self.background.wait(inbox)
        with self.entered(if_closed=True):
            if inbox.live:
                self.require_open()
                self.stepper.step()
        self.give_way()

    def leave(self, requests: list[Sequence] | Inbox, now: bool = True) -> None:
        """Cancel the requests of a call that broke off; not ``now``: the next call does it."""
        self._left.append(requests)
        # Inside, collected as garbage within a step: the next call, too. In a forked process: the other one.
        if now and not self._is_inside() and not self._is_forked():
            with self.entered(if_closed=True):
                pass

    def _cancel_left(self) -> None:
        """What `leave` was told. Only under the lock: a `submit` may be on its way into an inbox."""
        while self._left:
            requests = self._left[0]
            if requests is self.inbox:
                self.inbox = Inbox()  # what was not taken is of no use to a later call
            for sequence in list(requests.live if isinstance(requests, Inbox) else requests):
                if not isinstance(requests, Inbox):  # of a `submit` that did not return its id
                    sequence.inbox.live.pop(sequence, None)
                    sequence.inbox.ready.pop(sequence, None)
                    with _TAKING:
                        sequence.inbox = Inbox()
                self.stepper.cancel(sequence.request_id)
            self._left.popleft()
