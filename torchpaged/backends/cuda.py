"""The ``cuda`` backend: CUDA C++ kernels for decode on NVIDIA GPUs and for prefill on Hopper, and the Triton
kernels for everything else.

The kernels are compiled by NVRTC at the first call of a shape. Float32, and shapes that they do not take
(``specialise.py`` and ``prefill_shape.py`` in ``custom_ops/attention/cuda`` list them), run the kernels of
the ``triton`` backend, within the same error budget; so do all prompts with TORCHPAGED_CUDA_PREFILL=0.
`Choice.reason` says which kernel prompts run.
"""

from dataclasses import replace

import torch

from torchpaged.backends import triton_kernels
from torchpaged.backends.base import Backend
from torchpaged.backends.features import COMMON_FEATURES, OWN_FEATURES
from torchpaged.backends.semaphore import SemaphoreSession
from torchpaged.backends.spec import AttentionSpec
from torchpaged.custom_ops import BACKEND_OPS, variables


def _unavailable() -> str | None:
    from torchpaged.custom_ops.cuda import jit

    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return jit.unavailable() or triton_kernels.unavailable()


def _further(spec: AttentionSpec) -> list[str]:
    """What Triton's kernels say; and fp8 queries have one kernel, nothing serves what it does not take."""
    reasons = triton_kernels.further(spec)
    if "fp8_queries" not in spec.uses or spec.device.type != "cuda" or not torch.cuda.is_available():
        return reasons
    others = [f"no {name}" for name in spec.features if name in OWN_FEATURES - COMMON_FEATURES]
    own = [f"fp8 queries: {reason}" for reason in (_prefill_why_not(spec), *others) if reason]
    return reasons + own


def _prefill_why_not(spec: AttentionSpec) -> str | None:
    from torchpaged.custom_ops.attention.call import Specialisation
    from torchpaged.custom_ops.attention.cuda.prefill_shape import refuse

    if not variables.get("TORCHPAGED_CUDA_PREFILL"):
        return "TORCHPAGED_CUDA_PREFILL=0"
    if "block_sparse" in spec.uses:
        return "block_sparse"
    sizes = Specialisation(
        spec.dtype,
        spec.kv_dtype or spec.dtype,
        "fp8_queries" in spec.uses,
        spec.num_heads // spec.num_kv_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.head_dim_v or spec.head_dim,
        spec.block_size or 16,
        k_strides=(),
        v_strides=(),
    )
    return refuse(sizes, torch.cuda.get_device_capability(spec.device))


def _route(spec: AttentionSpec) -> str:
    """Which kernel prompts of a spec run, as far as the spec tells: strides and scale are seen by
    each call."""
    reason = _prefill_why_not(spec)
    return "prefill in CUDA C++" if reason is None else f"prefill by Triton: {reason}"


BACKEND = Backend(
    name="cuda",
    # what the kernel does not take, Triton's do, but for fp8 queries
    capabilities=replace(
        triton_kernels.CAPABILITIES,
        device_types=("cuda",),
        features=OWN_FEATURES | {"fp8_queries"},
        further=_further,
    ),
    ops=BACKEND_OPS["cuda"],
    unavailable=_unavailable,
    session=SemaphoreSession,
    route=_route,
)
