"""Kernels that one call launches are compiled at the same time, each in a thread: the compilers leave Python's lock free.

A mixed batch has two, prefill and decode. Only what a process compiles first gains by it; what is on disk is loaded in no time either way.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from torchpaged.custom_ops.triton import config

_compiled: set[Hashable] = set()


class Launch(NamedTuple):
    """A kernel and all that it is launched with."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> None:
        """Launch, on the current device and stream."""
        self.kernel[self.grid](*self.arguments, **self.options)

    def compile(self, device: torch.device) -> None:
        """Compile for these arguments; nothing is launched. A thread of its own starts on device 0."""
        with torch.cuda.device(device):
            self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)


def compile_together(key: Hashable, device: torch.device, *launches: Launch) -> None:
    """Compile the kernels of ``launches`` unless it was done for ``key``.

    The key need not tell everything: a kernel that is not compiled yet is so by its launch. Nothing is done within a capture, where another
    thread must not call the driver. What a compiler raises is raised here.
    """
    if key in _compiled or config.INTERPRET or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return
    with ThreadPoolExecutor(len(launches)) as threads:
        for done in [threads.submit(launch.compile, device) for launch in launches]:
            done.result()
    _compiled.add(key)
