"""CallLock: one call at a time into one `Generator`, and a turn for each thread that waits. Ctrl-C waits for
the end of its step."""

import _signal  # type: ignore[import-not-found]
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from torchpaged.custom_ops.errors import TorchpagedError

# For threads that wait for the lock: without it the one that steps would take it again and again.
_GIVE_WAY_SECONDS = 1e-4
#: Signals that wait for the end of a step, no enums, whose hash is Python. Windows has no alarms.
_CTRL_C, _ALARM = int(signal.SIGINT), int(getattr(signal, "SIGALRM", 0))


class CallLock:
    """The lock of all calls. Its holder knows that no other thread is inside, and can tell whether it is
    inside itself."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder = 0  # the thread that is inside: a little less long than it has the lock
        self._queue: dict[int, None] = {}  # threads that wait for the lock

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock.

        It may be taken again by its thread: the garbage collector may close a stream between the lock
        and the note of its holder, where nothing is half done either.

        Raises:
            TorchpagedError: this thread is inside already.
        """
        if self.is_inside():
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

    def is_inside(self) -> bool:
        """Whether this thread holds it."""
        # _is_owned is not public; threading.Condition relies on it. The note alone is not enough: Ctrl-C may
        # leave an old one behind.
        return bool(self._lock._is_owned()) and self._holder == threading.get_ident()  # type: ignore[attr-defined]

    def give_way(self) -> None:
        """Between two steps of one call: let in a thread that waits."""
        if self._queue:
            time.sleep(_GIVE_WAY_SECONDS)


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C, or an alarm, within the block comes when the block is over; a second one at once, for a step
    that hangs or compiles for minutes. In other threads, which get no signals, and where a signal has no
    handler in Python: nothing. A time limit's alarm mostly raises a plain error, which would be taken for one
    of the step, and be gone once the step is tried again."""
    found = {number: _signal.getsignal(number) for number in (_CTRL_C, _ALARM) if number}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    waiting: dict[int, tuple[Any, ...]] = {}
    if threading.current_thread() is not threading.main_thread() or not handlers:
        yield
        return

    def note(number: int, *where: Any) -> None:
        if (first := waiting.pop(number, None)) is None:
            waiting[number] = where
        else:
            handlers[number](number, *first)
            handlers[number](number, *where)

    try:
        for number in handlers:
            _signal.signal(number, note)
        yield
    finally:
        # Only behind a call may a signal raise: so whatever the first one brings, the second is made.
        try:
            if _ALARM in handlers:
                _signal.signal(_ALARM, handlers[_ALARM])
        finally:
            if _CTRL_C in handlers:
                _signal.signal(_CTRL_C, handlers[_CTRL_C])
        if waiting:
            with contextlib.ExitStack() as all_of_them:  # one that raises keeps no other back
                for number, where in waiting.items():
                    all_of_them.callback(handlers[number], number, *where)
