"""The ``cuda`` backend: a CUDA C++ decode kernel for NVIDIA GPUs, and the Triton kernels for everything else.

The kernel is compiled by NVRTC at the first call of a shape. Prefill, mixed batches, float32, and decode shapes that it does not take
(``custom_ops/cuda/specialise.py`` lists them) run the kernels of the ``triton`` backend, within the same error budget. With
TORCHPAGED_CUDA_PREFILL=1 whole prompts on Hopper run a CUDA C++ kernel (``custom_ops/cuda/prefill.py``), which awaits its fuzz on a GPU.
"""

from __future__ import annotations

import dataclasses

import torch

from torchpaged.backends.base import Backend
from torchpaged.backends.semaphore import SemaphoreSession
from torchpaged.backends.triton import BACKEND as TRITON
from torchpaged.custom_ops import BACKEND_OPS


def _unavailable() -> str | None:
    from torchpaged.custom_ops.cuda import jit

    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return jit.unavailable() or TRITON.unavailable()


BACKEND = Backend(
    name="cuda",
    capabilities=dataclasses.replace(TRITON.capabilities, device_types=("cuda",)),  # what the kernel does not take, Triton's do
    ops=BACKEND_OPS["cuda"],
    unavailable=_unavailable,
    session=SemaphoreSession,
)
