"""Checks of one argument: dimensions, dtype, device, strides, overlap; and whether values may be read.

Shapes, dtypes, devices and strides are checked always (no device work). Values that live on a device (block ids, slots,
lengths) can only be checked by reading them: on the CPU that is done always, on a GPU only with ``TORCHPAGED_CHECK=1``,
because it synchronises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from torchpaged.custom_ops import variables
from torchpaged.custom_ops.errors import ArgumentError


def shape_of(tensor: Tensor) -> str:
    """For a message."""
    return str(list(tensor.shape))


def check_dims(name: str, tensor: Tensor, *dims: int | None) -> None:
    """``tensor`` has ``len(dims)`` dimensions with these sizes; None accepts any size."""
    if tensor.dim() != len(dims) or any(d is not None and d != s for d, s in zip(dims, tensor.shape, strict=True)):
        want = "[" + ", ".join("*" if d is None else str(d) for d in dims) + "]"
        raise ArgumentError(name, f"shape {want}", shape_of(tensor))


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """``tensor`` has one of ``dtypes``."""
    if tensor.dtype not in dtypes:
        raise ArgumentError(name, " or ".join(map(str, dtypes)), str(tensor.dtype), f"convert with .to({dtypes[0]})")


def check_device(device: torch.device, **tensors: Tensor | None) -> None:
    """All ``tensors`` that are given live on ``device``."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ArgumentError(name, f"device {device}", str(tensor.device), f"move it with .to({str(device)!r})")


def check_last_dim(**tensors: Tensor) -> None:
    """The last dimension of each tensor is contiguous (the others may have any stride)."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ArgumentError(name, "a contiguous last dimension (stride 1)", f"strides {tensor.stride()}", "call .contiguous()")


_suspended = 0


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Within the block no values are read: a step that is being captured, even on a CPU, must not look at them."""
    global _suspended
    _suspended += 1
    try:
        yield
    finally:
        _suspended -= 1


def reads_values(device: torch.device) -> bool:
    """Whether values on ``device`` are checked: always on a CPU, with ``TORCHPAGED_CHECK=1`` on a GPU, never during a capture."""
    if _suspended:
        return False
    asked_for = checks_device_values()  # read on a CPU as well: a value that means nothing raises everywhere
    if device.type == "cpu":
        return True
    return asked_for and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def checks_device_values() -> bool:
    """Whether ``TORCHPAGED_CHECK=1`` asks for checks that synchronise; raises `ValueError` if the variable is neither 0 nor 1."""
    return bool(variables.get("TORCHPAGED_CHECK"))


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""
    if not a.numel() or not b.numel():
        return False
    ends = [t.data_ptr() + t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) for t in (a, b)]
    return a.data_ptr() < ends[1] and b.data_ptr() < ends[0]


def refuse_grad(**tensors: Tensor | None) -> None:
    """Raise `ArgumentError` if grad mode is on and a tensor requires grad: these ops have no backward."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise ArgumentError(name, "a tensor without grad (paged attention is for inference)", "requires_grad=True",
                                    "run under torch.inference_mode() or torch.no_grad()")  # fmt: skip
