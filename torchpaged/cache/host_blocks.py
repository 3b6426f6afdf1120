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
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchpaged.cache.block_pool import NULL_BLOCK
from torchpaged.cache.host_copies import STAGING, GPUCopies, HostMemory, free_retired
from torchpaged.cache.kv_cache import PagedKVCache
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError, NotCopied
from torchpaged.custom_ops.words import counted, of_bytes


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
        free_retired()
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
        self._memory = HostMemory(memory_budget, self.bytes_per_block, self._on_gpu)
        self.num_slots = self._memory.num_slots
        if not self.num_slots:
            raise ArgumentError(
                "memory_budget",
                f"at least {self.bytes_per_block} bytes, those of a block in all layers",
                str(memory_budget),
            )
        with torch.inference_mode(False):
            made = (self._pools, self._places, self._memory, cache.device)
            self._copies = GPUCopies(*made) if self._on_gpu else None
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
        """The memory of a slot, ``[bytes_per_block]`` uint8. A `fence` is waited for before it is read
        or filled."""
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
        count = min(self.num_slots, max(1, STAGING // self.bytes_per_block))
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
