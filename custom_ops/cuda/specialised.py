"""Launches of kernels whose constants follow from a specialisation alone."""

import ctypes
import functools
from collections.abc import Hashable
from typing import Protocol

import torch

from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.config import Config
from torchpaged.custom_ops.cuda.loaded_kernel import Kernel


class Spec(Hashable, Protocol):
    """What a kernel is compiled for."""

    def config(self) -> Config:
        """The constants."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""


@functools.cache
def kernel(file: str, name: str, spec: Spec, index: int) -> Kernel:
    """Kernel ``name`` of ``file`` (one of `jit.files`) for ``spec`` on a device; raises as `jit.kernel`."""
    device = torch.device("cuda", index)
    return jit.kernel(file, name, spec.config(), device, shared_bytes=spec.shared_bytes)


def launch(
    file: str, name: str, spec: Spec, index: int, grid: int, threads: int, params: ctypes.Structure
) -> None:
    """Launch `kernel` on its device's current stream, early where the device can."""
    kernel(file, name, spec, index).launch(grid, threads, params, early=gpu.launches_early(index))
