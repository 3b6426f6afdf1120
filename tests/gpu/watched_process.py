"""A process that runs cases on the GPU under a watchdog: it is killed, and replaced, when a case does
not end."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest


class WatchedProcess:
    """Runs ``script`` of this folder, which says "ready", and for each line that names a case "launched" and
    "done", or what failed.

    Args:
        script: its file's name.
        compile_seconds: until a case is compiled and launched.
        run_seconds: from then until it is done.
    """

    def __init__(self, script: str, *, compile_seconds: float, run_seconds: float = 60) -> None:
        self.script, self.compile_seconds, self.run_seconds = script, compile_seconds, run_seconds
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str] = queue.Queue()

    def start(self) -> None:
        root = Path(__file__).parents[2]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, str(Path(__file__).with_name(self.script))]
        self.process = process = subprocess.Popen(
            command, cwd=root, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.lines = lines = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line.rstrip())
            lines.put("failed: the process ended")

        threading.Thread(target=read, daemon=True).start()
        self.expect("ready", 120, "start")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def expect(self, wanted: str, seconds: float, case: str) -> None:
        try:
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            self.stop()
            pytest.fail(f"{case}: no {wanted!r} within {seconds} s: it hangs")
        if line != wanted:
            self.stop()  # after a failure on the GPU the process is of no more use
            pytest.fail(f"{case}: {line.replace(' | ', chr(10))}")

    def run(self, case: str) -> None:
        if self.process is None:
            self.start()
        assert self.process is not None
        assert self.process.stdin is not None
        print(case, file=self.process.stdin, flush=True)
        self.expect("launched", self.compile_seconds, case)
        self.expect("done", self.run_seconds, case)
