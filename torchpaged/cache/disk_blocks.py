"""DiskBlocks: blocks in a file, written and read by threads of its own, with a checksum of each.

    disk = DiskBlocks("/scratch", size=100 * 2**30, row_bytes=host.bytes_per_block)
    written = disk.write([(slot, row)], after=host.fence())     # rows: uint8 tensors of host memory
    [checksum] = written.wait()
    faults = disk.read([(slot, other)], [checksum], after=host.fence()).wait()  # [""]: as it was written

The file has no name from the moment on that it is made: no other process can open it, several may use one
folder, and its memory is free when this process ends, however it ends. (``df`` counts it, ``ls`` and ``du``
don't.) It grows as slots are written. Checksums are kept in memory, so that a write that was lost is found
as well as an altered byte; CRC-32 finds accidents, not forgery.
"""

import os
import tempfile
import time
import zlib
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchpaged.cache.host_blocks import Arrival
from torchpaged.cache.host_tier import Told
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError, NotCopied
from torchpaged.custom_ops.words import counted, of_bytes

T = TypeVar("T")
#: Why blocks did not come back. What the system says has its own words.
WRONG_CHECKSUM, TRUNCATED = "wrong checksum", "truncated"
#: One does not read as fast as a disk can.
_READERS = 4
_SAMPLE = 32 * 2**20  # bytes that are written and read at the start, for the rates
_HOPE = 1 + 1 / 32


class Job(Generic[T]):
    """Rows on their way to the file or back; one result each.

    Args:
        parts: of threads.
        spans: when each began and ended, once it did.
    """

    def __init__(self, parts: Sequence[Future[list[T]]], spans: Sequence[tuple[float, float]] = ()) -> None:
        self._parts, self._spans = parts, spans

    @property
    def seconds(self) -> float:
        """From the beginning of its first part to the end of its last one, whenever it was asked."""
        return max((end for _, end in self._spans), default=0.0) - min(
            (n for n, _ in self._spans), default=0.0
        )

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(part.done() for part in self._parts)

    def wait(self) -> list[T]:
        """The results."""
        return [one for part in self._parts for one in part.result()]


class DiskBlocks(NotCopied):
    """Slots for blocks in a file.

    Args:
        folder: exists, and can be written to.
        size: bytes of the file at most.
        row_bytes: of a block.

    Attributes:
        num_slots: blocks that fit.
        in_rate: bytes per second back from the file, as they were written: of a sample at first, then of the
            reads so far, later ones counting more.

    Raises:
        ArgumentError: ``size`` is less than a block, or ``folder`` is none that can be written to.
    """

    _BOUND, _ADVICE = "it has an open file and threads", "make a new one"

    def __init__(self, folder: str | os.PathLike[str], size: int, row_bytes: int) -> None:
        check_sizes(row_bytes=row_bytes)
        self.row_bytes, self.num_slots = row_bytes, size // row_bytes
        if self.num_slots < 1:
            raise ArgumentError("size", f"at least {row_bytes} bytes, those of a block", str(size))
        try:
            self._file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115  closed by `close`
        except OSError as error:
            raise ArgumentError("folder", "one that can be written to", f"{folder}: {error}") from error
        # The writer goes on slowly, so that what a request waits for does not stand behind it.
        self._writer = ThreadPoolExecutor(1, "torchpaged disk writer")
        self._readers = ThreadPoolExecutor(_READERS, "torchpaged disk reader")
        try:
            self.in_rate = self._measure()
        except OSError as error:
            self.close()
            raise ArgumentError("folder", "one with room for blocks", f"{folder}: {error}") from error

    def __repr__(self) -> str:
        size = of_bytes(self.num_slots * self.row_bytes)
        return f"{type(self).__name__}({counted(self.num_slots, 'block')}, {size})"

    def write(self, rows: Sequence[tuple[int, Tensor]], after: Callable[[], object]) -> Job[int | Exception]:
        """Write rows behind those of the calls before.

        Args:
            rows: slots, each with a row: ``[row_bytes]`` uint8 in host memory, which stays as it is until the
                job is done.
            after: called in the thread first; returns when the rows are there.

        Returns:
            Of each its checksum, or why it was not written.
        """
        return Job([self._writer.submit(self._write, rows, after)])

    def read(
        self, rows: Sequence[tuple[int, Tensor]], checksums: Sequence[int], after: Callable[[], object]
    ) -> Job[str]:
        """Read rows of writes that are done.

        Args:
            rows: as in `write`; they are filled.
            checksums: of `write`.
            after: called in the thread first; returns when the rows may be written.

        Returns:
            Of each "", or why it is not what was written.
        """
        part, spans = -(-len(rows) // _READERS), list[tuple[float, float]]()
        return Job(
            [
                self._readers.submit(self._read, rows[i : i + part], checksums[i : i + part], after, spans)
                for i in range(0, len(rows), part)
            ],
            spans,
        )

    def note_read(self, num_rows: int, seconds: float) -> None:
        """So many rows came back in so long, those left out that did not come back as they were written."""
        if seconds > 0:
            self.in_rate = (self.in_rate + num_rows * self.row_bytes / seconds) / 2

    def note_unread(self) -> None:
        """It was too slow to be asked. The next time it is taken for a little faster: it may have been slow
        for a while, which only a read can tell."""
        self.in_rate *= _HOPE

    def close(self) -> None:
        """Give the file's memory back. Jobs that have not begun never end; nothing if it is closed."""
        for threads in (self._writer, self._readers):
            threads.shutdown(cancel_futures=True)
        self._file.close()

    # --------------------------------------------------------------------------------------------- in threads
    # What a job raises would be raised where its result is read, the repair of a step that raised included.
    def _write(
        self, rows: Sequence[tuple[int, Tensor]], after: Callable[[], object]
    ) -> list[int | Exception]:
        try:
            after()
        except Exception as error:
            return [error] * len(rows)
        return [self._write_row(slot, row.numpy().data) for slot, row in rows]

    def _write_row(self, slot: int, row: memoryview) -> int | Exception:
        try:
            written = 0
            while written < self.row_bytes:
                place = slot * self.row_bytes + written
                written += os.pwrite(self._file.fileno(), row[written:], place)
            return zlib.crc32(row)
        except Exception as error:
            return error

    def _read(
        self,
        rows: Sequence[tuple[int, Tensor]],
        checksums: Sequence[int],
        after: Callable[[], object],
        spans: list[tuple[float, float]],
    ) -> list[str]:
        try:
            after()
        except Exception as error:
            return [why(error)] * len(rows)
        began = time.perf_counter()
        faults = [
            self._read_row(slot, row.numpy().data, checksum)
            for (slot, row), checksum in zip(rows, checksums, strict=True)
        ]
        spans.append((began, time.perf_counter()))
        return faults

    def _read_row(self, slot: int, row: memoryview, checksum: int) -> str:
        try:
            count = 0
            while count < self.row_bytes:
                place = slot * self.row_bytes + count
                got = os.preadv(self._file.fileno(), [row[count:]], place)
                if not got:
                    return TRUNCATED
                count += got
            return "" if zlib.crc32(row) == checksum else WRONG_CHECKSUM
        except Exception as error:
            return why(error)

    def forget_cached(self) -> None:
        """Have the system keep nothing of the file in its memory, where it can be told: the next reads are
        the disk's."""
        os.fsync(self._file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _measure(self) -> float:
        count = max(1, min(self.num_slots, _SAMPLE // self.row_bytes))
        rows = list(enumerate(torch.ones(count, self.row_bytes, dtype=torch.uint8, device="cpu")))
        checksums = [self._write_row(slot, row.numpy().data) for slot, row in rows]
        for checksum in checksums:
            if isinstance(checksum, Exception):
                raise checksum
        self.forget_cached()
        began = time.perf_counter()
        faults = self.read(rows, [c for c in checksums if isinstance(c, int)], lambda: None).wait()
        if any(faults):
            raise OSError(f"reading back what was just written: {next(filter(None, faults))}")
        return count * self.row_bytes / (time.perf_counter() - began)


def why(error: Exception) -> str:
    """What the system said, in words without numbers and paths of one case."""
    said = error.strerror if isinstance(error, OSError) else None
    return (said or str(error) or type(error).__name__).lower()


class DiskCopy(NamedTuple):
    """A block in the file: its place, and the checksum of what was written."""

    place: int
    checksum: int


@dataclass(eq=False)
class Returning:
    """Blocks that come from the host, and others that come there from the file first: an `Arrival`.

    Attributes:
        keys, blocks: of all of them.
        arrival: of those that the host has.
        cold: places of the others in ``keys``.
        copies, slots: of these, in the file and on the host.
        job: which reads them.
        told: told how it ended.
        returned: called with it once ``job`` is done: sets `is_over`, and `then` if it was not left.
        is_left, is_over: whether no request wants it any more, and whether ``returned`` was called.
        then: of what came from the file; None: nothing, or not yet.
    """

    keys: list[Hashable]
    blocks: list[int]
    arrival: Arrival
    cold: list[int]
    copies: list[DiskCopy]
    slots: list[int]
    job: Job[str]
    told: Told
    returned: "Callable[[Returning], None]"
    is_left: bool = False
    is_over: bool = False
    then: Arrival | None = None

    def ready(self) -> bool:
        """See `Arrival`."""
        if not self.is_over:
            if not self.job.done():
                return False
            self.returned(self)
        return self.arrival.ready() and (self.then is None or self.then.ready())

    def wait(self) -> None:
        """See `Arrival`: the host waits for the file."""
        if not self.is_over:
            self.job.wait()
            self.returned(self)
        self.arrival.wait()
        if self.then is not None:
            self.then.wait()

    def leave(self) -> None:
        """See `Arrival`."""
        self.is_left = True
        self.arrival.leave()
        if self.then is not None:
            self.then.leave()
