"""The CUDA C++ prefill kernel on random batches: it ends, its results are right, and the same every time; under a watchdog."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prefill_worker import CONFIGURATIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the kernel is written for compute capability 9.0",
    ),
]
COMPILE_S, RUN_S = 120, 60
BATCHES = 25  # of each configuration


class Worker:
    """A process that checks batches one after another; killed and replaced when one does not end."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str] = queue.Queue()

    def start(self) -> None:
        root = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, str(Path(__file__).with_name("prefill_worker.py"))]
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
        assert self.process is not None and self.process.stdin is not None
        print(case, file=self.process.stdin, flush=True)
        self.expect("launched", COMPILE_S, case)
        self.expect("done", RUN_S, case)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    one = Worker()
    yield one
    one.stop()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_random_batches(worker: Worker, name: str) -> None:
    for seed in range(BATCHES):
        worker.run(f"{name} {seed}")
