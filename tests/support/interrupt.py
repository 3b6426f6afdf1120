"""Ctrl-C at a chosen line."""

import gc
import linecache
import signal
import sys
from pathlib import Path
from typing import Any, Self


class Interrupt:
    """SIGINT at the n-th line that runs in ``files``, ``times`` times; n = 0 only counts. The garbage
    collector, which may close an earlier engine in the same files, waits.

    Attributes:
        lines: that ran.
        where: it was raised.
    """

    def __init__(self, at: int, files: tuple[str, ...], times: int = 1) -> None:
        self.at, self.lines, self.where = at, 0, ""
        self._files, self._times, self._before = files, times, sys.gettrace()

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._files):
            return None
        # Python lets a signal in after a call, where a function begins and where a loop turns: not at a bare
        # `try`, nor where a `with` ends
        line = linecache.getline(code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith(("try:", "with ")):
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{Path(code.co_filename).name}:{frame.f_lineno}"
                for _ in range(self._times):
                    signal.raise_signal(signal.SIGINT)
        return self._trace

    def __enter__(self) -> Self:
        # a process that runs tests may ignore it
        self._handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.disable()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._before)
        gc.enable()
        signal.signal(signal.SIGINT, self._handler)
