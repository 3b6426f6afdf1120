"""Kernels that one call launches are compiled at the same time, each in a thread: the compilers leave
Python's lock free.

A mixed batch has two, prefill and decode. Only what a process compiles first gains by it; what is on disk is
loaded in no time either way.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from torchpaged.custom_ops.triton import kernel_store, launching
from torchpaged.custom_ops.triton.kernel_store import KernelRef

_compiled: set[Hashable] = set()


class Launch(NamedTuple):
    """A kernel and all that it is launched with; ``grid`` has one dimension, as stored ones need."""

    kernel: KernelRef
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> None:
        """Launch, on the current device and stream: what is stored, else by Triton.

        Raises:
            ValueError: ``grid`` has more than one dimension.
        """
        if len(self.grid) != 1:
            raise ValueError(f"grid: expected one dimension, got {self.grid}")
        stored = self._stored()
        if stored is None and self._on_cuda():
            stored = kernel_store.keep(self.kernel, self.arguments, self.options, self._compiled)
        if stored is not None:
            stored.launch(self.grid, self.arguments)
        else:
            self.kernel.load()[self.grid](*self.arguments, **self.options)

    def _compiled(self) -> Any:
        return self.kernel.load().warmup(*self.arguments, grid=self.grid, **self.options)

    def is_stored(self) -> bool:
        """Whether Triton is not needed."""
        return self._stored() is not None

    def _stored(self) -> kernel_store.StoredKernel | None:
        return kernel_store.find(self.kernel, self.arguments, self.options) if self._on_cuda() else None

    def _on_cuda(self) -> bool:
        return any(
            isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in self.arguments[:1]
        )

    def compile(self, device: torch.device) -> None:
        """Compile for these arguments; nothing is launched. A thread of its own starts on device 0."""
        with torch.cuda.device(device):
            self._compiled()


def compile_together(key: Hashable, device: torch.device, *launches: Launch) -> None:
    """Compile the kernels of ``launches`` unless it was done for ``key``.

    The key need not tell everything: a kernel that is not compiled yet is so by its launch. Nothing is done
    within a capture, where another thread must not call the driver. What a compiler raises is raised here.
    """
    if (
        key in _compiled
        or launching.INTERPRET
        or device.type != "cuda"
        or torch.cuda.is_current_stream_capturing()
    ):
        return
    missing = [launch for launch in launches if not launch.is_stored()]
    if len(missing) > 1:
        for launch in missing:
            launch.kernel.load()  # imported by one thread
        with ThreadPoolExecutor(len(missing)) as threads:
            for done in [threads.submit(launch.compile, device) for launch in missing]:
                done.result()
    _compiled.add(key)
