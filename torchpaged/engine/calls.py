"""Calls: one call at a time into one `Generator`, and whose requests are whose.

    calls = Calls(stepper)
    with calls.entered():           # no other thread is inside, and Ctrl-C waits
        stepper.step()
    for event in calls.stream():
        ...

A call owns requests by an `Inbox`. A request's own `Sequence.log` holds its events; the inbox only says
where to look. So nothing is lost when a step breaks off, and no call takes events of another one's requests.
A call that breaks off cancels its requests (`leave`); where it can't at once, because the garbage collector
closed it in the middle of a step, the next call does.

A call that wants events makes steps itself. With a `BackgroundLoop` it waits for those of the loop's thread,
which is one more caller (`advance`, `_events`).
"""

import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Protocol

from torchpaged.custom_ops.errors import ArgumentError, ClosedError, TorchpagedError
from torchpaged.engine.call_lock import CallLock, interrupts_wait
from torchpaged.engine.hand_out import TAKING, HandOut
from torchpaged.engine.outputs import TokenEvent
from torchpaged.engine.sequence import Inbox, Sequence
from torchpaged.engine.stepper import Stepper

#: Cancelled requests that belong to no stream: so many, the latest, keep their unread events.
NUM_UNREAD = 1024


class Background(Protocol):
    """What makes the steps in a thread of its own: `torchpaged.engine.background.BackgroundLoop`.

    Attributes:
        process: where the thread is; a process forked from it has none.
    """

    process: int

    def deliver(self) -> None:
        """A call is over: give all waiting callers what has happened."""

    def follow(self, inbox: Inbox) -> Iterator[TokenEvent]:
        """Events until all requests of ``inbox`` have ended."""

    def waiter(self, inbox: Inbox) -> Callable[[], object]:
        """What waits until they have ended; the caller holds the lock."""

    def events(
        self, taker: Callable[[], Callable[[Inbox], object]], owner: object
    ) -> AsyncIterator[TokenEvent]:
        """Of one request, for asyncio."""

    def end(self, reason: BaseException) -> None:
        """No step follows; callers that wait get ``reason``."""

    def join(self) -> None:
        """Wait for the thread's end."""


class Calls:
    """The calls into one generator, of any number of threads.

    Args:
        stepper: moves the requests of all of them.
        disk: its blocks go to a disk, by threads of this process.

    Attributes:
        inbox: of the submitted requests that belong to no stream over some of them. Another one after a
            stream over all of them broke off.
        stepper: as given; gone when it is closed.
        background: whose thread makes the steps; None: calls make them.
        closed: no call is let in any more.
        lock: of all of them.
    """

    def __init__(self, stepper: Stepper, disk: bool = False) -> None:
        self.stepper = stepper
        self._disk_process = os.getpid() if disk else None
        self.inbox = Inbox()
        self.background: Background | None = None
        self.closed = False
        self.lock = CallLock()
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

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock alone.

        Raises:
            TorchpagedError: as `CallLock.held` or `require_own_process`.
        """
        self.require_own_process()
        return self.lock.held()

    def _forked_from(self) -> int | None:
        """The process that has the threads of this generator, where this one was forked from it."""
        background = self.background  # once: without the lock it may end in between
        process = self._disk_process if background is None else background.process
        return None if process == os.getpid() else process

    def require_own_process(self) -> None:
        """Refuse a call in a process forked from that of the background loop or of the disk, whose threads it
        has not; the lock may have been held when it was forked.

        Raises:
            TorchpagedError: it is.
        """
        process = self._forked_from()
        if process is not None:
            threads = "threads of disk_cache_path" if self.background is None else "loop of start()"
            raise TorchpagedError(
                f"the {threads} of this Generator run in process {process}; this one, {os.getpid()}, was "
                "forked from it and has none of them: make a Generator in each process, after the fork"
            )

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

    def require_no_background(self) -> None:
        """Refuse `step` while the background loop makes the steps."""
        if self.background is not None:
            raise TorchpagedError(
                "step(): the background loop makes the steps since start(); read events by "
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
    def loop_for(self, call: str) -> Background:
        """The background loop, which ``call`` needs.

        Raises:
            ClosedError, TorchpagedError: closed, of another process, or there is none.
        """
        self.require_open()
        self.require_own_process()
        background = self.background
        if background is None:
            raise TorchpagedError(f"{call}: no background loop makes steps; call start() first")
        return background

    def claim(self, request_ids: list[int], inbox: Inbox) -> None:
        """Make ``inbox`` the owner of these submitted requests; the caller holds the lock.

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
            with TAKING:
                sequence.inbox = inbox

    def cancel(self, request_id: int) -> None:
        """End a request, if it has not ended; the caller holds the lock. Unread events of a request that
        belongs to no stream are dropped once `NUM_UNREAD` more such requests were cancelled."""
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
            if inbox is not self.inbox:
                inbox.forget()
        except BaseException:
            if inbox is not None:
                self.leave(inbox)
            raise
        finally:
            if self._stream_of_all is mark:
                self._stream_of_all = None

    def _events(self, inbox: Inbox) -> Iterable[TokenEvent]:
        """Those that ``inbox`` has, or else gets by a step; of a background loop all to come."""
        if (background := self.background) is not None:
            return background.follow(inbox)
        with self.entered(if_closed=True):
            if not inbox.waiting:
                self.require_open()
                self.stepper.step()
            handed = HandOut(inbox)
        self.lock.give_way()
        return handed

    def waiter(self, inbox: Inbox) -> Callable[[], object]:
        """What waits for a background loop to end the requests of ``inbox``; without one it does nothing. The
        caller holds the lock, since it queued them: a step in between could raise unseen."""
        return (lambda: None) if self.background is None else self.background.waiter(inbox)

    def advance(self, inbox: Inbox) -> None:
        """One step, unless another thread has ended all requests of ``inbox``; a background loop does them
        all."""
        with self.entered(if_closed=True):
            wait = self.waiter(inbox)
            if self.background is None and inbox.live:
                self.require_open()
                self.stepper.step()
        wait()
        self.lock.give_way()

    def leave(self, requests: list[Sequence] | Inbox, now: bool = True) -> None:
        """Cancel the requests of a call that broke off; not ``now``: the next call does it."""
        self._left.append(requests)
        # Inside, collected as garbage within a step: the next call, too. In a forked process: the other one.
        if now and not self.lock.is_inside() and self._forked_from() is None:
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
                    with TAKING:
                        sequence.inbox = Inbox()
                self.stepper.cancel(sequence.request_id)
            self._left.popleft()
