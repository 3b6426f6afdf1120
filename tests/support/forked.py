"""What calls say in a forked process."""

import os
import signal
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def said_in_a_child(
    calls: Mapping[str, Callable[[], Any]], once_forked: Callable[[], Any] = lambda: None
) -> dict[str, str]:
    """What each of ``calls`` raises in a child that is forked now, "nothing" where it returns. A hang ends
    after 60 seconds, and fails. ``once_forked`` is called in the parent, before it waits."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads
        child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        for name, call in calls.items():
            try:
                call()
                said = "nothing"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writer, f"{name}: {said}\n".encode())
        os._exit(0)
    once_forked()
    os.close(writer)
    with os.fdopen(reader) as file:
        told = dict(line.split(": ", 1) for line in file.read().splitlines())
    assert os.waitpid(child, 0)[1] == 0, told
    assert told.keys() == calls.keys()
    return told
