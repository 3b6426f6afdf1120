"""The ``cuda`` backend: CUDA C++ kernels for decode (NVIDIA GPUs) and prefill (Hopper), and the Triton kernels for everything else.

The kernels are compiled by NVRTC at the first call of a shape. Mixed batches, float32, fp8 prefill, and shapes that they do not take
(``custom_ops/cuda/specialise.py`` and ``prefill.py`` list them) run the kernels of the ``triton`` backend, within the same error budget.
"""

from __future__ import annotations

import dataclasses

import torch

from torchpaged.backends.base import Backend
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
)
