"""Staging: host memory that steps' numbers travel from to the device, and the events that say when they have.

    staging = Staging(num_bytes=4096, device=torch.device("cuda"))
    memory = staging.take()
    memory.words["q"][:3] = array("q", [5, 9, 2])
    staging.send(memory, target)        # its first bytes; nothing waits

A copy from fresh pinned memory would cost the host an allocation, a copy and three tensors more.
"""

import ctypes
from collections import deque
from typing import Any

import torch
from torch import Tensor

from torchpaged.metadata.host import record_behind


class StagedMemory:
    """Numbers of one step at a time.

    Attributes:
        tensor: ``[num_bytes]`` uint8 on the host, pinned for a GPU.
        words: the same by the type codes of arrays: what is assigned to a slice of one lies in ``tensor``.
        event: behind its last copy; None on a CPU, where that is over at once.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False):
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu, device="cpu")
        held = memoryview((ctypes.c_char * num_bytes).from_address(self.tensor.data_ptr())).cast("B")
        self.words: dict[str, Any] = {code: held.cast(code) for code in ("i", "q")}
        self.event = torch.Event(device) if on_gpu else None
        self._parts: dict[int, Tensor] = {}  # made once, since sending is host time

    def first(self, num_bytes: int) -> Tensor:
        """So many bytes of ``tensor``."""
        part = self._parts.get(num_bytes)
        if part is None:
            part = self._parts[num_bytes] = self.tensor[:num_bytes]
        return part


class Staging:
    """Memory of steps: each piece is written again once its copy is done, and another one is made where all
    are on their way.

    Args:
        num_bytes: of a step at most, a multiple of 8.
        device: where steps run.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes, self._device = num_bytes, device
        self._sent = deque[StagedMemory]()  # the one that was sent first in front

    def take(self) -> StagedMemory:
        """Memory to write into, until `send`; what it holds is of no meaning."""
        if self._sent and ((event := self._sent[0].event) is None or event.query()):
            return self._sent.popleft()
        return StagedMemory(self._num_bytes, self._device)

    def send(self, memory: StagedMemory, target: Tensor) -> None:
        """Copy its first bytes into ``target``, uint8 on the device. Memory of a copy that is interrupted is
        not used again; torch's allocator keeps it until the copy is done."""
        target.copy_(memory.first(target.numel()), non_blocking=True)
        if memory.event is not None:
            record_behind(memory.event, self._device)
        self._sent.append(memory)
