"""Kernels compiled ahead of their first launch, side by side, in threads.

    with ahead.gathering() as gathered:
        step(padding)                # its results mean nothing
    gathered.wait()                  # the kernels are in this process, or on the disk

Within the block ops of this thread launch no kernel that has to be compiled: NVRTC's raise `Postponed`, which
ends their op, until it is compiled; Triton's are compiled instead of launched. Large products are left out.
So outputs are whatever lay in memory. Where ops are watched (``launches.around``) nothing is gathered, and
all is launched.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from typing import Any

from torchpaged.custom_ops import launches

#: Compilers that run at once. Each takes hundreds of megabytes, and in a container `os.cpu_count` is the
#: host's.
_ROOM = threading.BoundedSemaphore(min(os.cpu_count() or 1, 16))
_local = threading.local()


class Postponed(Exception):
    """An op's kernel is being compiled; nothing was launched."""


class Gathering:
    """Kernels that are being compiled, by what tells them apart.

    Attributes:
        kernels: name and compilation of each.
    """

    def __init__(self) -> None:
        self.kernels: dict[Hashable, tuple[str, Future[Any]]] = {}

    def compile(self, key: Hashable, name: str, compile: Callable[[], Any]) -> None:
        """Compile a kernel in a thread, unless that was begun here."""
        if key not in self.kernels:
            self.kernels[key] = name, in_a_thread(compile, name)

    def wait(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Wait for all of them. One that fails does so again, with its message, at its launch."""
        waiting = [(name, future) for name, future in self.kernels.values() if not future.done()]
        for done, (name, future) in enumerate(waiting):
            future.exception()
            if progress is not None:
                progress(done + 1, len(waiting), f"kernel {name}")


def here() -> Gathering | None:
    """Into what this thread gathers; None: it launches."""
    return getattr(_local, "gathering", None)


@contextlib.contextmanager
def gathering() -> Iterator[Gathering]:
    """Gather the kernels that this thread's ops lack."""
    found = Gathering()
    if launches.around is not None:
        yield found
        return
    launches.around = lambda op, arguments: contextlib.suppress(Postponed)  # raised in this thread alone
    _local.gathering = found
    try:
        yield found
    finally:
        _local.gathering, launches.around = None, None


def in_a_thread(compile: Callable[[], Any], name: str) -> Future[Any]:
    """Run a compiler in a thread, which a process that ends does not wait for; as many at once as there are
    cores, at most 16."""
    future: Future[Any] = Future()

    def run() -> None:
        with _ROOM:
            try:
                future.set_result(compile())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, name=f"torchpaged compiles {name}", daemon=True).start()
    return future
