"""The ``cuda`` backend: CUDA C++ kernels for decode on NVIDIA GPUs and for prefill on Hopper, and the Triton
kernels for everything else.

The kernels are compiled by NVRTC at the first call of a shape. Float32, and shapes that they do not take
(``custom_ops/attention/cuda/specialise.py`` and ``custom_ops/attention/cuda/prefill.py`` list them), run the
kernels of the ``triton`` backend, within the same error budget; so do all prompts with
TORCHPAGED_CUDA_PREFILL=0. `Choice.reason` says which kernel prompts run.
"""

from __future__ import annotations

import dataclasses

import torch

from torchpaged.backends import triton_kernels
from torchpaged.backends.base import Backend
from torchpaged.backends.semaphore import SemaphoreSession
from torchpaged.backends.spec import AttentionSpec
from torchpaged.custom_ops import BACKEND_OPS, variables


def _unavailable() -> str | None:
    from torchpaged.custom_ops.cuda import jit

    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return jit.unavailable() or triton_kernels.unavailable()


def _route(spec: AttentionSpec) -> str:
    """Which kernel prompts of a spec run, as far as the spec tells: each call sees strides and scale."""
    from torchpaged.custom_ops.attention.cuda import prefill

    reason: str | None = "TORCHPAGED_CUDA_PREFILL=0"
    if variables.get("TORCHPAGED_CUDA_PREFILL"):
        reason = prefill.refuse(
            spec.dtype,
            spec.kv_dtype or spec.dtype,
            spec.head_dim,
            spec.head_dim_v or spec.head_dim,
            spec.num_heads // spec.num_kv_heads,
            spec.block_size or 16,
            torch.cuda.get_device_capability(spec.device),
        )
    return "prefill in CUDA C++" if reason is None else f"prefill by Triton: {reason}"


BACKEND = Backend(
    name="cuda",
    # what its own kernels do not take, Triton's do
    capabilities=dataclasses.replace(triton_kernels.CAPABILITIES, device_types=("cuda",)),
    ops=BACKEND_OPS["cuda"],
    unavailable=_unavailable,
    session=SemaphoreSession,
    route=_route,
)
