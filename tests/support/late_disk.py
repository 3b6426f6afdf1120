"""A disk without threads, as late as draws say, so that every order of events repeats with its seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from torchpaged.cache.disk_blocks import DiskBlocks


class LateJob:
    """Done when it is waited for, or asked and drawn; in no time."""

    seconds = 0.0

    def __init__(self, draw: random.Random, work: Callable[[], list[Any]], before: list[LateJob]) -> None:
        self._draw, self._work, self._before = draw, work, before
        self._results: list[Any] | None = None

    def done(self) -> bool:
        if self._results is None and self._draw.random() < 0.4:
            self.wait()
        return self._results is not None

    def wait(self) -> list[Any]:
        if self._results is None:
            for job in self._before:
                job.wait()
            self._before.clear()
            self._results = self._work()
        return self._results


class LateDisk(DiskBlocks):
    """`DiskBlocks` whose rows are read and written at the last moment.

    Attributes:
        draw: when, and what becomes of the file.
    """

    draw: random.Random

    def __init__(self, draw: random.Random, *args: Any) -> None:
        self.draw, self._late = draw, list[LateJob]()
        super().__init__(*args)

    def write(self, rows: Any, after: Any) -> Any:
        job = LateJob(self.draw, lambda: self._write(rows, after), list(self._late))
        self._late.append(job)
        return job

    def read(self, rows: Any, checksums: Any, after: Any) -> Any:
        return LateJob(self.draw, lambda: self._read(rows, checksums, after, []), [])

    def spoil(self) -> None:
        """Something else writes into the file, or cuts it off."""
        with open(self._file.fileno(), "r+b", buffering=0, closefd=False) as file:
            size = file.seek(0, 2)
            if self.draw.random() < 0.3:
                file.truncate(self.draw.randint(0, size))
            elif size:
                file.seek(self.draw.randrange(size))
                file.write(b"\x55" * self.draw.randint(1, 40))
