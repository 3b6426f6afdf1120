"""What every launcher of a Triton kernel asks: whether it may launch here, and how early."""

import os
import sys
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_dtype
from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.custom_ops.triton import notice

#: Kernels run in Triton's interpreter, on CPU tensors.
INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device; 7 in the interpreter."""
    return 7 if INTERPRET else gpu.num_sms(device.index or 0)


def launches_early(device: torch.device) -> bool:
    """As `gpu.launches_early`, of any device."""
    return device.type == "cuda" and torch.version.hip is None and gpu.launches_early(device.index or 0)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of the device."""
    return gpu.capability(device.index or 0)


def is_hopper(device: torch.device) -> bool:
    """Whether the device has compute capability 9.x; in the interpreter all do."""
    if device.type != "cuda" or torch.version.hip is not None:
        return INTERPRET
    return capability(device)[0] == 9


def early_launch(device: torch.device) -> dict[str, Any]:
    """Options of a kernel with the constexpr ``PDL``, which waits for the kernels before it by itself where
    it can."""
    early = launches_early(device)
    return {"PDL": early} | ({"launch_pdl": True} if early else {})


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


def require_floats(**tensor: Tensor) -> None:
    """`require_launchable`, of a tensor of float32, bfloat16 or float16."""
    for name, x in tensor.items():
        require_launchable(x)
        check_dtype(name, x, torch.bfloat16, torch.float16, torch.float32)


def watch_compiles() -> None:
    """Have the screen told what Triton compiles from now on; imports Triton."""
    if not INTERPRET:
        notice.install()


def fp8_limit(cache: Tensor) -> float:
    """The largest number of an fp8 cache; 0 for others."""
    return torch.finfo(cache.dtype).max if cache.element_size() == 1 else 0.0


def require_fp8(cache: Tensor, what: str = "cache") -> None:
    """e4m3 conversions need compute capability 8.9 on NVIDIA; ``what``: of this dtype, for the message."""
    if cache.dtype == torch.float8_e4m3fn and cache.device.type == "cuda" and torch.version.hip is None:
        found = capability(cache.device)
        if found < (8, 9):
            raise BackendUnavailableError(
                f"backend 'triton': a float8_e4m3fn {what} needs compute capability 8.9, got {found}; "
                "use float8_e5m2 or bfloat16"
            )
