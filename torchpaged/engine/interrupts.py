"""Ctrl-C in the middle of a step: it waits until the step is over."""

# What `signal` wraps, without its search for members of an enumeration: 1.5 us a step for 17.
import _signal  # type: ignore[import-not-found]
import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


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
