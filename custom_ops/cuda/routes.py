"""How an op of the ``cuda`` backend comes to its kernel: what all of them refuse alike, and the way to
Triton's for calls that the kernels for Hopper can't take."""

import importlib
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import BackendUnavailableError

Call = TypeVar("Call")


def require_gpu(device: torch.device) -> None:
    """Refuse tensors elsewhere; raises `BackendUnavailableError`."""
    if device.type != "cuda":
        raise BackendUnavailableError(
            f"backend 'cuda': its kernels run on an NVIDIA GPU, got tensors on {device.type}"
        )


def hopper_or_triton(
    call: Call,
    device: torch.device,
    *,
    route: Callable[[Call], str | None],
    check: Callable[[Call], None],
    launch: Callable[[Call], None],
    triton: str,
) -> None:
    """Check and launch a call that ``route`` has no reason to leave to Triton; else launch Triton's, which
    checks it.

    Args:
        call: the record of an op's arguments.
        device: of its tensors.
        route: why the call goes to Triton, or None: from shapes, dtypes, strides and addresses, never from
            lengths.
        check: refuses bad arguments.
        launch: launches the kernel for Hopper.
        triton: the module of Triton's launches, whose function has the module's name. Imported when it is
            needed: importing Triton takes longer than loading a kernel from the disk.

    Raises:
        BackendUnavailableError: the tensors are not on a GPU.
    """
    require_gpu(device)
    if route(call) is not None:
        getattr(importlib.import_module(triton), triton.rpartition(".")[2])(call)
        return
    check(call)
    launch(call)


def not_hopper(capability: tuple[int, int]) -> str | None:
    """Why kernels for Hopper can't run on a device of this compute capability, or None."""
    return None if capability == (9, 0) else f"compute capability {capability[0]}.{capability[1]}, not 9.0"


def unaligned(*rows: tuple[str, Tensor, int]) -> str | None:
    """The first of these tensors whose rows can't be copied by 16 bytes, or None; each with its name and the
    number of its leading dimensions that step from row to row."""
    for name, tensor, count in rows:
        strides = [stride * tensor.element_size() for stride in tensor.stride()[:count]]
        if tensor.data_ptr() % 16 or any(stride % 16 for stride in strides) or tensor.stride(-1) != 1:
            return f"{name} with strides {tuple(tensor.stride())}: rows that begin at multiples of 16 bytes"
    return None
