"""Batches on which attention never ended do end, with right results; each under a watchdog, in a process that can be killed."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hanging_batches import CASES, SEEN

pytestmark = pytest.mark.gpu
BACKENDS = ("triton", "cuda")
COMPILE_S, RUN_S = 300, 60  # until all is compiled and launched; from then on


class Worker:
    """A process that runs cases one after another; killed and replaced when one does not end."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        root = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("hang_worker.py"))], cwd=root, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        lines: queue.Queue[str] = queue.Queue()
        self.lines = lines
        output = self.process.stdout

        def read() -> None:
            assert output is not None
            for line in output:
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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_ends(worker: Worker, backend: str, name: str) -> None:
    worker.run(f"once {backend} {name}")


@pytest.mark.parametrize("name", [*SEEN, "fp8_more_queries", "padded_of_128", "fp8_prompt_2k"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_in_a_graph_with_other_lengths(worker: Worker, backend: str, name: str) -> None:
    worker.run(f"replay {backend} {name}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_mixed_batches(worker: Worker, backend: str) -> None:
    """The decode launch of a mixed batch starts beside the prefill launch, without a wait of its own."""
    worker.run(f"layers {backend} mixed")


def test_the_watchdog_notices() -> None:
    """A process that never answers is a failure that names its case, and is gone afterwards."""
    one = Worker()
    one.start()
    process = one.process
    with pytest.raises(pytest.fail.Exception, match=r"sleeper: no 'done' within 1 s: it hangs"):
        one.expect("done", 1, "sleeper")
    assert process is not None and process.poll() is not None and one.process is None
