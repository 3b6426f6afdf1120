"""HostBlocks: blocks of a `PagedKVCache` in host memory, and the copies there and back (swap).

    host = HostBlocks(cache, memory_budget=8 * 2**30)
    host.swap_out([7, 8], slots=[0, 1])      # the blocks may be given to others at once
    arrival = host.swap_in([0, 1], blocks=[3, 4])
    arrival.ready() or arrival.wait()        # then steps may read blocks 3 and 4

On the host all layers of a block are contiguous. On a GPU the memory is pinned, and copies run on
streams of their own: packed by one kernel for all layers, then copied, however many slots it is, by one call
of the driver. Nothing waits on the host. A slot may be read as soon as `swap_out` returned, and filled anew
once what `swap_in` read of it has arrived. On a CPU they are plain copies.
"""

import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from torchpaged.cache.block_pool import NULL_BLOCK
from torchpaged.cache.kv_cache import PagedKVCache
from torchpaged.custom_ops.block_ops.many_copies import can_copy_many, copy_many
from torchpaged.custom_ops.block_ops.packing import BlockPacking
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError, NotCopied
from torchpaged.custom_ops.words import counted, of_bytes
from torchpaged.metadata.host import to_device

#: Bytes on the GPU that a part of a copy goes through; there are two of them for each way.
_STAGING = 64 * 2**20
#: Pinned memory comes in powers of two: in pieces of so many bytes no more than asked is taken.
_PIECE = 256 * 2**20


class Arrival(Protocol):
    """Blocks on their way into the pools."""

    def ready(self) -> bool:
        """Whether they have arrived; waits for nothing."""

    def wait(self) -> None:
        """What is launched on the current stream from now on comes after their arrival; the host does not
        wait, unless they come from a disk."""

    def leave(self) -> None:
        """No request wants them any more: the same, but what has not begun to arrive never will, and is not
        waited for."""


class _Arrived:
    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        return

    leave = wait


class _OnStream:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def ready(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    leave = wait


class HostBlocks(NotCopied):
    """Slots for blocks on the host.

    Args:
        cache: whose blocks; layers with blocks of their own (states, rings) are left out.
        memory_budget: bytes of host memory at most.

    Attributes:
        num_slots: blocks that fit.
        bytes_per_block: of all layers.
        out_rate, in_rate: bytes per second of copies to the host and back, measured once at the start.

    Raises:
        ArgumentError: no layer has blocks of the cache's pool, a layer's blocks are not contiguous, or the
            budget holds no block.
        NotCopyableError: it is copied or pickled.
    """

    _BOUND, _ADVICE = "its slots are places in this process's memory", "make a new one of the copied cache"

    def __init__(self, cache: PagedKVCache, memory_budget: int) -> None:
        check_sizes(memory_budget=memory_budget)
        pools = [
            pool.detach()
            for layer, spec in enumerate(cache.layers)
            if layer not in cache.blocks_of
            for pool in spec.block_tensors(cache[layer]).values()
        ]
        if not pools:
            raise ArgumentError("cache", "one with layers that keep blocks of its pool", repr(cache))
        if not all(pool[0].is_contiguous() for pool in pools):
            raise ArgumentError("cache", "layers whose blocks are contiguous", repr(cache))
        self._pools = [pool.view(torch.uint8).flatten(1) for pool in pools]
        widths = [pool.shape[1] for pool in self._pools]
        self._places = [sum(widths[:part]) for part in range(len(widths) + 1)]
        self.bytes_per_block, self._device = self._places[-1], cache.device
        self._on_gpu = cache.device.type == "cuda"
        self._memory = _Memory(memory_budget, self.bytes_per_block, self._on_gpu)
        self.num_slots = self._memory.num_slots
        if not self.num_slots:
            raise ArgumentError(
                "memory_budget",
                f"at least {self.bytes_per_block} bytes, those of a block in all layers",
                str(memory_budget),
            )
        with torch.inference_mode(False):
            self._copies = (
                _GPUCopies(self._pools, self._places, self._memory, cache.device) if self._on_gpu else None
            )
        self.out_rate, self.in_rate = self._measure()

    def __repr__(self) -> str:
        size = of_bytes(self.num_slots * self.bytes_per_block)
        return f"{type(self).__name__}({counted(self.num_slots, 'block')}, {size}, of {str(self._device)!r})"

    def swap_out(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks to the host: as what is launched by now on the current stream leaves them. What is
        launched later may write into them.

        Args:
            blocks: ids.
            slots: where each goes, in ``[0, num_slots)``.
        """
        self._require_alike(blocks, slots)
        if self._copies is not None:
            return self._copies.out(blocks, slots)
        for at, held in self._memory.runs(slots):
            index = torch.tensor(blocks[at : at + len(held)], dtype=torch.int64, device="cpu")
            for pool, place in zip(self._pools, self._places, strict=False):
                held[:, place : place + pool.shape[1]].copy_(pool.index_select(0, index))

    def wait_for_arrivals(self) -> None:
        """What `swap_out` copies from now on comes after all that `swap_in` has begun: for a slot that is
        filled anew while it is read."""
        if self._copies is not None:
            self._copies.order()

    def swap_in(self, slots: Sequence[int], blocks: Sequence[int]) -> Arrival:
        """Copy blocks back from the host, into others or the same, behind all that is launched by now on the
        current stream. Steps read them, and the caller gives them away, after `Arrival.wait`, or when
        `Arrival.ready` was True.

        Args:
            slots: of `swap_out`.
            blocks: where each goes.
        """
        self._require_alike(blocks, slots)
        if self._copies is not None:
            return self._copies.into(slots, blocks)
        for at, held in self._memory.runs(slots):
            index = torch.tensor(blocks[at : at + len(held)], dtype=torch.int64, device="cpu")
            for pool, place in zip(self._pools, self._places, strict=False):
                pool.index_copy_(0, index, held[:, place : place + pool.shape[1]])
        return _Arrived()

    def row(self, slot: int) -> Tensor:
        """The memory of a slot, ``[bytes_per_block]`` uint8. Who reads or fills it waits for a `fence`."""
        [(_, held)] = self._memory.runs([slot])
        return held[0]

    def fence(self) -> Callable[[], None]:
        """What waits, on the host and in any thread, for all copies that were begun by now."""
        return (lambda: None) if self._copies is None else self._copies.fence()

    def _require_alike(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        if len(blocks) != len(slots):
            raise ArgumentError("slots", f"one for each of {len(blocks)} blocks", str(len(slots)))

    def _measure(self) -> tuple[float, float]:
        """Bytes per second out and in, of the null block, which holds nothing; kernels are compiled by it."""
        count = min(self.num_slots, max(1, _STAGING // self.bytes_per_block))
        blocks, slots, seconds = [NULL_BLOCK] * count, list(range(count)), [0.0, 0.0]
        for _ in range(2):  # the first of each pays for the first touch of the memory
            seconds = [
                self._timed(lambda: self.swap_out(blocks, slots)),
                self._timed(lambda: self.swap_in(slots, blocks)),
            ]
        copied = count * self.bytes_per_block
        return copied / seconds[0], copied / seconds[1]

    def _timed(self, copy: Callable[[], object]) -> float:
        self.settle()
        began = time.perf_counter()
        copy()
        self.settle()
        return time.perf_counter() - began

    def settle(self) -> None:
        """Wait on the host until all copies are done."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


class _Memory:
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


def _tell_allocator(pieces: list[Tensor], streams: Sequence[torch.cuda.Stream], byte: Tensor) -> None:
    """That these streams use ``pieces``, which are about to be freed: of copies that are not its own torch's
    allocator does not know, and would give pinned memory away in the middle of one. ``byte``: on the GPU."""
    for stream in streams:
        with torch.cuda.stream(stream):
            for piece in pieces:
                byte.copy_(piece[0, :1], non_blocking=True)
        byte.record_stream(stream)


class _GPUCopies:
    """Through buffers on the GPU.

    Args:
        pools: ``[num_blocks, bytes]`` uint8 each.
        places: where a block of each begins in a row; then the bytes of a row.
        memory: on the host.
        device: a GPU.
    """

    def __init__(self, pools: list[Tensor], places: list[int], memory: _Memory, device: torch.device) -> None:
        self._memory = memory
        self._device = device
        self._out, self._in = _Buffers(places[-1], device), _Buffers(places[-1], device)
        self._packing = BlockPacking(pools, places[:-1])
        self._unpacks = torch.cuda.Stream(device)
        # Freed in the middle of a copy, memory waits for it.
        for tensor in (*pools, *self._packing.tables, *self._in.buffers):
            tensor.record_stream(self._unpacks)
        streams = self._out.stream, self._in.stream
        byte = torch.empty(1, dtype=torch.uint8, device=device)
        weakref.finalize(self, _tell_allocator, memory.pieces, streams, byte).atexit = False

    def out(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Packed on the current stream, so that blocks are free at once, then copied. A copy of more than
        both buffers hold makes the current stream wait for the link."""
        current = torch.cuda.current_stream(self._device)
        ids = to_device(blocks, torch.int64, self._device)
        for first, buffer, free in self._out.parts(len(blocks)):
            current.wait_event(free)
            with torch.cuda.device(self._device):  # the driver's call, too, is of its context
                self._packing.run(buffer, ids[first : first + len(buffer)], unpack=False)
                self._out.stream.wait_stream(current)
                self._memory.copy(buffer, slots[first : first + len(buffer)], True, self._out.stream)
            free.record(self._out.stream)

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
        self._out.stream.wait_stream(self._in.stream)

    def into(self, slots: Sequence[int], blocks: Sequence[int]) -> _OnStream:
        """The way back; when all of them have arrived. What is launched by now may still use the blocks, or
        fill the slots. Unpacked on a stream of its own, beside the copy of the next part."""
        current = torch.cuda.current_stream(self._device)
        self._in.stream.wait_stream(self._out.stream)
        with torch.cuda.stream(self._unpacks):
            ids = to_device(blocks, torch.int64, self._device)
            self._unpacks.wait_stream(current)
            for first, buffer, free in self._in.parts(len(blocks)):
                self._in.stream.wait_event(free)
                self._memory.copy(buffer, slots[first : first + len(buffer)], False, self._in.stream)
                self._unpacks.wait_stream(self._in.stream)
                self._packing.run(buffer, ids[first : first + len(buffer)], unpack=True)
                free.record(self._unpacks)
        return _OnStream(self._unpacks.record_event(), self._device)


class _Buffers:
    """Two buffers and the stream of one way: one is filled while the other is emptied."""

    def __init__(self, row_bytes: int, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.rows, self._next = max(1, _STAGING // row_bytes), 0
        self.buffers = [torch.empty(self.rows, row_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        for buffer in self.buffers:
            buffer.record_stream(self.stream)
        self._free = [torch.cuda.Event() for _ in range(2)]

    def parts(self, count: int) -> Iterator[tuple[int, Tensor, torch.cuda.Event]]:
        """Parts of ``count`` blocks that a buffer holds: where each begins, as many rows of the buffer, and
        the event of its last use."""
        for first in range(0, count, self.rows):
            turn, self._next = self._next, 1 - self._next
            yield first, self.buffers[turn][: count - first], self._free[turn]
