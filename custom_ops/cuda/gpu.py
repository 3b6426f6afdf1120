"""Facts of a GPU that launch shapes follow from, asked once per device."""

import functools
from typing import Any

import torch

from torchpaged.custom_ops.early_launch import refuse_inductors


@functools.cache
def num_sms(index: int) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def shared_per_sm(index: int) -> int:
    """Shared memory of a multiprocessor, in bytes."""
    return torch.cuda.get_device_properties(index).shared_memory_per_multiprocessor


@functools.cache
def shared_per_cta(index: int) -> int:
    """Most shared memory that a thread block may ask for, in bytes."""
    properties: Any = torch.cuda.get_device_properties(index)  # torch's stubs lack this one
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of a device."""
    return torch.cuda.get_device_capability(index)


@functools.cache
def launches_early(index: int) -> bool:
    """Whether kernels are launched with programmatic dependent launch: compute capability 9.0 and later.

    Raises:
        BackendUnavailableError: they are, and at the first call for this device Inductor's kernels would
            be too.
    """
    early = capability(index) >= (9, 0)
    if early:
        refuse_inductors()
    return early
