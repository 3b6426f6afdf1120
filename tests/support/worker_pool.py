"""Cases in processes of their own, with a watchdog: a hang or a crash costs its case and its process, not
the run.

    with WorkerPool("fuzz.case:run_case", workers=4) as pool:
        for outcome in pool.run({"seed": seed} for seed in range(100)):
            print(outcome.kind, outcome.case, outcome.message)

A worker calls the target, ``function(case, beat) -> result``, for one case after the other. Cases, beats and
results are JSON, one a line. ``beat(phase, **facts)`` says what the worker is about to do; each phase has a
limit of its own, so that compiling may take long and running may not. A worker that passes it is killed with
the processes that it started, and the next case gets a new one.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Seconds that a phase may take. "launching": the host's part of a launch, with all that is compiled;
#: "running": the device's.
LIMITS = {"starting": 180.0, "preparing": 60.0, "launching": 180.0, "running": 60.0, "checking": 60.0}
_STARTS = 3  # workers in a row that end before their first case: it isn't the case


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        kind: "done"; "hang": its phase passed the limit; "crash": the process ended; "error": the target
            raised; "cut": the time was up.
        result: what the target returned, if done.
        phase, seconds: what it was about to do when it ended, and for how long.
        facts: of all its beats, the later over the earlier.
        message: the exception, or the end of what the worker wrote to stderr; the stack of a hang is there.
    """

    case: dict[str, Any]
    kind: str
    result: dict[str, Any] | None = None
    phase: str = ""
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    message: str = ""


class _Worker:
    def __init__(self, target: str, environment: Mapping[str, str], stderr: Path) -> None:
        self.stderr = stderr
        variables = {**os.environ, **environment}
        path = (variables.get("PYTHONPATH"), str(Path(__file__).parents[2]))  # a checkout needs no install
        with stderr.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, __file__, target],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**variables, "PYTHONPATH": os.pathsep.join(filter(None, path))},
                start_new_session=True,
            )
        self.case: dict[str, Any] | None = None
        self.pending = b""
        self.ready = False
        self.facts: dict[str, Any] = {}
        self.enter("starting")

    def enter(self, phase: str) -> None:
        self.phase, self.since = phase, time.monotonic()

    def give(self, case: dict[str, Any]) -> None:
        self.case, self.facts = case, {}
        self.enter("preparing" if self.ready else "starting")
        with suppress(BrokenPipeError):  # it is dead: seen where it is read from
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(case).encode() + b"\n")
            self.process.stdin.flush()

    def outcome(self, kind: str, **more: Any) -> Outcome:
        case, self.case = self.case, None
        return Outcome(
            case or {},
            kind,
            phase=self.phase,
            seconds=time.monotonic() - self.since,
            facts=self.facts,
            **more,
        )

    def last_words(self) -> str:
        return self.stderr.read_bytes()[-4000:].decode(errors="replace")

    def _ask_for_stack(self) -> None:
        """Have it write its stack to stderr: all is there when nothing more comes. Ten seconds at most."""
        before = size = self.stderr.stat().st_size
        self.process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            time.sleep(0.3)
            size, last = self.stderr.stat().st_size, size
            if size == last > before:
                return

    def kill(self, with_stack: bool = False) -> None:
        """End the process and those that it started, a compiler's perhaps: they are a group of their own."""
        if with_stack and self.ready and self.process.poll() is None:
            self._ask_for_stack()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        # a process whose kernel never ends may take the driver a while, and is not waited for
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


class WorkerPool:
    """Up to ``workers`` processes that run ``target``, ``"module:function"``.

    Args:
        target: importable in a new process, whose environment is this one's and ``environment``.
        limits: seconds per phase, over `LIMITS`; a phase of another name has the limit of "preparing".
    """

    def __init__(
        self,
        target: str,
        *,
        workers: int = 1,
        limits: Mapping[str, float] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._target, self._most, self._limits = target, workers, {**LIMITS, **(limits or {})}
        self._environment = dict(environment or {})
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._folder = tempfile.TemporaryDirectory(prefix="torchpaged-workers-")
        self._started = self._failed_starts = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, cases: Iterable[dict[str, Any]], *, seconds: float | None = None, reserve: float = 0.0
    ) -> Iterator[Outcome]:
        """The outcomes, in the order in which cases end. After ``seconds - reserve`` no case is given out,
        after ``seconds`` those that still run are cut.

        Raises:
            RuntimeError: workers end before they take a case.
        """
        begin, waiting = time.monotonic(), iter(cases)
        following: dict[str, Any] | None = next(waiting, None)
        while True:
            now = time.monotonic() - begin
            while (
                following is not None
                and (seconds is None or now < seconds - reserve)
                and (worker := self._idle()) is not None
            ):
                worker.give(following)
                following = next(waiting, None)
            busy = [worker for worker in self._workers if worker.case is not None]
            if not busy:
                return
            for key, _ in self._selector.select(timeout=0.2):
                yield from self._read(key.data)
            for worker in busy:
                if worker.case is not None and time.monotonic() - worker.since > self._limit(worker.phase):
                    yield self._end(worker, "hang")
                elif worker.case is not None and seconds is not None and time.monotonic() - begin > seconds:
                    yield self._end(worker, "cut")

    def close(self) -> None:
        """End all workers."""
        for worker in list(self._workers):
            self._drop(worker)
        self._selector.close()
        self._folder.cleanup()

    def _limit(self, phase: str) -> float:
        return self._limits.get(phase, self._limits["preparing"])

    def _idle(self) -> _Worker | None:
        for worker in self._workers:
            if worker.case is None:
                return worker
        if len(self._workers) == self._most:
            return None
        worker = _Worker(self._target, self._environment, Path(self._folder.name) / f"{self._started}.txt")
        self._started += 1
        self._workers.append(worker)
        self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
        return worker

    def _drop(self, worker: _Worker, with_stack: bool = False) -> None:
        self._selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        self._workers.remove(worker)
        worker.kill(with_stack)

    def _end(self, worker: _Worker, kind: str) -> Outcome:
        outcome = worker.outcome(kind)
        self._drop(worker, with_stack=kind == "hang")
        outcome.message = worker.last_words()
        return outcome

    def _read(self, worker: _Worker) -> Iterator[Outcome]:
        """Take in what a worker wrote."""
        assert worker.process.stdout is not None
        data = os.read(worker.process.stdout.fileno(), 1 << 16)
        if not data:
            self._failed_starts = 0 if worker.ready else self._failed_starts + 1
            outcome = worker.outcome("crash") if worker.case is not None else None
            # it closed its end: its own exit status, not that of being killed
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(5)
            self._drop(worker)
            message = f"exit status {worker.process.returncode}; {worker.last_words()}"
            if self._failed_starts >= _STARTS:
                raise RuntimeError(f"{_STARTS} workers in a row ended before they took a case: {message}")
            if outcome is not None:
                outcome.message = message
                yield outcome
            return
        *lines, worker.pending = (worker.pending + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "ready" in answer:
                worker.ready, self._failed_starts = True, 0
                worker.enter("preparing")
            elif "phase" in answer:
                worker.enter(answer.pop("phase"))
                worker.facts.update(answer)
            elif "error" in answer:
                outcome = worker.outcome("error", message=answer["error"])
                self._drop(worker)  # it is ending
                yield outcome
                return
            else:
                yield worker.outcome("done", result=answer["result"])


def main() -> None:
    """A worker: cases from stdin, until it ends. What libraries print goes to stderr, since stdout is
    the pool's."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)

    def say(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    def beat(phase: str, **facts: Any) -> None:
        say(phase=phase, **facts)

    module, function = sys.argv[1].split(":")
    run = getattr(importlib.import_module(module), function)
    say(ready=True)
    for line in sys.stdin:
        try:
            result = run(json.loads(line), beat)
        except Exception:
            say(error=traceback.format_exc()[-4000:])
            sys.exit(1)  # a device whose kernel failed serves this process no more
        say(result=result)


if __name__ == "__main__":
    main()
