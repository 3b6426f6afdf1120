"""What every launcher of a Triton kernel asks: whether it may launch here, and how early."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.early_launch import refuse_inductors
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.custom_ops.triton import notice

#: Kernels run in Triton's interpreter, on CPU tensors.
INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def _num_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device; 7 in the interpreter."""
    return 7 if INTERPRET else _num_sms(device.index or 0)


def launches_early(device: torch.device) -> bool:
    """Whether kernels are launched with programmatic dependent launch: compute capability 9.0 and later.

    Raises:
        BackendUnavailableError: they are, and at the first call for this device Inductor's kernels would
            be too.
    """
    return device.type == "cuda" and torch.version.hip is None and _launches_early(device.index or 0)


@functools.cache
def _launches_early(index: int) -> bool:
    early = capability(index) >= (9, 0)
    if early:
        refuse_inductors()
    return early


def early_launch(device: torch.device) -> dict[str, Any]:
    """Options of a kernel with the constexpr ``PDL``, which waits for the kernels before it by itself where
    it can."""
    early = launches_early(device)
    return {"PDL": early} | ({"launch_pdl": True} if early else {})


@functools.cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of a device."""
    return torch.cuda.get_device_capability(index)


def require_launchable(tensor: Tensor) -> None:
    """Triton kernels need a GPU, or the interpreter."""
    if tensor.device.type == "cpu" and not INTERPRET:
        raise BackendUnavailableError(
            "backend 'triton': its kernels run on a GPU, got CPU tensors; use backend='cpu' or "
            "'reference', or set "
            "TRITON_INTERPRET=1 before Python starts to run them in Triton's interpreter"
        )
    if "triton" in sys.modules:  # else what is launched was stored, and needs no import of it
        watch_compiles()


def watch_compiles() -> None:
    """Have the screen told what Triton compiles from now on; imports Triton."""
    if not INTERPRET:
        notice.install()


def require_fp8(cache: Tensor) -> None:
    """e4m3 conversions need compute capability 8.9 on NVIDIA."""
    if cache.dtype == torch.float8_e4m3fn and cache.device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(cache.device)
        if capability < (8, 9):
            raise BackendUnavailableError(
                f"backend 'triton': a float8_e4m3fn cache needs compute capability 8.9, got {capability}; "
                "use float8_e5m2 or bfloat16"
            )
