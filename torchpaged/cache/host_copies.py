"""Copies between a GPU's pools and host memory: the memory, the buffers and the streams of `HostBlocks`."""

import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from torchpaged.custom_ops.block_ops.many_copies import can_copy_many, copy_many
from torchpaged.custom_ops.block_ops.packing import BlockPacking
from torchpaged.metadata.host import record_behind, to_device

#: Bytes on the GPU that a part of a copy goes through; there are two of them for each way.
STAGING = 64 * 2**20
#: Pinned memory comes in powers of two: in pieces of so many bytes no more than asked is taken.
_PIECE = 256 * 2**20


class GPUArrival:
    """`Arrival` of blocks at an event on the device."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def ready(self) -> bool:
        """See `Arrival`."""
        return self._event.query()

    def wait(self) -> None:
        """See `Arrival`."""
        # By itself an event takes the stream of the device that is current, another one in some threads.
        self._event.wait(torch.cuda.current_stream(self._event.device))

    leave = wait


class HostMemory:
    """Host memory for blocks, pinned or not, in pieces."""

    def __init__(self, memory_budget: int, row_bytes: int, pin: bool) -> None:
        sixteenth = 1 << max(memory_budget.bit_length() - 4, 0)  # or up to an eighth: no more is left over
        piece = max(min(_PIECE, sixteenth), row_bytes)
        self._rows, size = piece // row_bytes, (piece // row_bytes, row_bytes)
        with torch.inference_mode(False):
            self.pieces = [
                torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
                for _ in range(memory_budget // piece)
            ]
        self.num_slots = len(self.pieces) * self._rows
        self._row_bytes, places = row_bytes, range(0, self._rows * row_bytes, row_bytes)
        bases = [piece.data_ptr() for piece in self.pieces]
        self._addresses = array("Q", [base + place for base in bases for place in places])  # of slots

    def runs(self, slots: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Of neighbouring slots: where in ``slots`` a run begins, and its memory ``[n, bytes]``."""
        for start, end in pairwise(self._edges(slots)):
            piece, row = divmod(slots[start], self._rows)
            yield start, self.pieces[piece][row : row + end - start]

    def _edges(self, slots: Sequence[int]) -> list[int]:
        """Where in ``slots`` runs of neighbours in one piece begin; then their number."""
        rows = self._rows
        inner = [n for n, (a, b) in enumerate(pairwise(slots), 1) if b != a + 1 or not b % rows]
        return [0, *inner, len(slots)] if slots else []

    def copy(self, buffer: Tensor, slots: Sequence[int], out: bool, stream: torch.cuda.Stream) -> None:
        """Between the rows of ``buffer`` on a GPU and ``slots``."""
        if not can_copy_many():
            with torch.cuda.stream(stream):
                for start, held in self.runs(slots):
                    rows = buffer[start : start + len(held)]
                    (held if out else rows).copy_(rows if out else held, non_blocking=True)
            return
        edges, base, size = self._edges(slots), buffer.data_ptr(), self._row_bytes
        there = [self._addresses[slots[start]] for start in edges[:-1]]
        here = [base + start * size for start in edges[:-1]]
        sizes = [(end - start) * size for start, end in pairwise(edges)]
        copy_many(there if out else here, here if out else there, sizes, stream.cuda_stream)


#: Of copies that are gone.
_retired: list[tuple[list[Tensor], Sequence[torch.cuda.Stream], Tensor]] = []


def free_retired() -> None:
    """Give back the pinned memory of copies that are gone. Launches some, so not within a capture."""
    while _retired:
        try:
            retired = _retired.pop()
        except IndexError:  # another thread was quicker
            return
        _tell_allocator(*retired)


def _tell_allocator(pieces: list[Tensor], streams: Sequence[torch.cuda.Stream], byte: Tensor) -> None:
    """That these streams use ``pieces``, which are about to be freed: of copies that are not its own torch's
    allocator does not know, and would give pinned memory away in the middle of one. ``byte``: on the GPU."""
    for stream in streams:
        with torch.cuda.stream(stream):
            for piece in pieces:
                byte.copy_(piece[0, :1], non_blocking=True)
        byte.record_stream(stream)


class GPUCopies:
    """Through buffers on the GPU.

    Args:
        pools: ``[num_blocks, bytes]`` uint8 each.
        places: where a block of each begins in a row; then the bytes of a row.
        memory: on the host.
        device: a GPU.
    """

    def __init__(
        self, pools: list[Tensor], places: list[int], memory: HostMemory, device: torch.device
    ) -> None:
        self._memory, self._device = memory, device
        self._out, self._in = _Buffers(places[-1], device), _Buffers(places[-1], device)
        self._packing = BlockPacking(pools, places[:-1])
        self._unpacks = torch.cuda.Stream(device)
        self._event = torch.Event(device)  # of `_order`, for one order behind the other
        # Freed in the middle of a copy, memory waits for it.
        for tensor in (*pools, *self._packing.tables, *self._in.buffers):
            tensor.record_stream(self._unpacks)
        streams = self._out.stream, self._in.stream
        byte = torch.empty(1, dtype=torch.uint8, device=device)
        # Only kept: the garbage collector may come in the middle of the capture of another engine.
        weakref.finalize(self, _retired.append, (memory.pieces, streams, byte)).atexit = False

    def out(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Packed on the current stream, so that blocks are free at once, then copied. A copy of more than
        both buffers hold makes the current stream wait for the link."""
        with torch.cuda.device(self._device):  # the driver's call, too, is of its context
            ids = to_device(blocks, torch.int64, self._device)
            for first, buffer, free in self._out.parts(len(blocks)):
                free.wait()
                self._packing.run(buffer, ids, first, unpack=False)
                self._order(None, self._out.stream)
                self._memory.copy(buffer, slots[first : first + len(buffer)], True, self._out.stream)
                free.record(self._out.stream)

    def _order(self, ahead: torch.cuda.Stream | None, behind: torch.cuda.Stream) -> None:
        """What is launched on ``behind`` from now on comes after what is launched by now on ``ahead``, the
        current device's current stream if it is None. A kept `torch.Event` takes a third of the time of
        `wait_stream`."""
        self._event.record(ahead)
        self._event.wait(behind)

    def fence(self) -> Callable[[], None]:
        """See `HostBlocks.fence`."""
        events = [torch.cuda.Event(blocking=True) for _ in range(2)]
        for event, stream in zip(events, (self._out.stream, self._in.stream), strict=True):
            event.record(stream)

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def order(self) -> None:
        """Copies to the host come after those back that were begun."""
        self._order(self._in.stream, self._out.stream)

    def into(self, slots: Sequence[int], blocks: Sequence[int]) -> GPUArrival:
        """The way back; when all of them have arrived. What is launched by now may still use the blocks, or
        fill the slots. Unpacked on a stream of its own, beside the copy of the next part."""
        self._order(self._out.stream, self._in.stream)
        record_behind(self._event, self._device)
        self._event.wait(self._unpacks)
        with self._unpacks:  # `torch.cuda.stream` takes ten times as long
            ids = to_device(blocks, torch.int64, self._device)
            for first, buffer, free in self._in.parts(len(blocks)):
                free.wait(self._in.stream)
                self._memory.copy(buffer, slots[first : first + len(buffer)], False, self._in.stream)
                self._order(self._in.stream, self._unpacks)
                self._packing.run(buffer, ids, first, unpack=True)
                free.record()
            arrived = torch.Event(self._device)
            arrived.record()
        return GPUArrival(arrived)


class _Buffers:
    """Two buffers and the stream of one way: one is filled while the other is emptied."""

    def __init__(self, row_bytes: int, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.rows, self._next = max(1, STAGING // row_bytes), 0
        self.buffers = [torch.empty(self.rows, row_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        for buffer in self.buffers:
            buffer.record_stream(self.stream)
        self._free = [torch.Event(device) for _ in range(2)]

    def parts(self, count: int) -> Iterator[tuple[int, Tensor, torch.Event]]:
        """Parts of ``count`` blocks that a buffer holds: where each begins, as many rows of the buffer, and
        the event of its last use."""
        for first in range(0, count, self.rows):
            turn, self._next = self._next, 1 - self._next
            yield first, self.buffers[turn][: count - first], self._free[turn]
