"""Backends around libraries that run prompts of delta nets: the ops ``linear_attention`` and ``delta_step``
in a namespace of their own, which give the library the calls that it was proved for and the device's own
kernels all others.

    BACKEND = state_backend("flashinfer_gdn", PACKAGE, _attend, _step, why_own)

The choice follows from shapes, dtypes, strides and addresses, never from lengths.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchpaged.backends import triton_kernels
from torchpaged.backends.base import Backend
from torchpaged.backends.library_op import defined
from torchpaged.backends.package import Package
from torchpaged.backends.semaphore import SemaphoreSession
from torchpaged.backends.spec import AttentionSpec
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.callers_modes import apart_from_modes
from torchpaged.custom_ops.registry import FAKES
from torchpaged.custom_ops.state.call import DeltaStepCall, LinearAttentionCall
from torchpaged.custom_ops.state.check import check_linear_attention
from torchpaged.custom_ops.state.check_steps import check_delta_step
from torchpaged.custom_ops.state.schema import SCHEMAS

WIDTH = 128  # of keys and values
PROVED = (9, 0)


def why_own_rows(call: LinearAttentionCall, min_tokens: int) -> str | None:
    """Of what a library does not take, what both have in common; None: it takes the call.

    Args:
        call: not checked yet.
        min_tokens: of a call and of its longest row, as `LinearAttentionCall.max_query_len` bounds it.
    """
    q, v, state, out = call.q, call.v, call.state, call.out
    if any(x.dim() != 3 for x in (q, call.k, v, out)) or state.dim() != 4:
        return "shapes that the check refuses"
    if min(call.max_query_len, v.shape[0]) < min_tokens or not call.state_slots.numel():
        return f"rows of fewer than {min_tokens} tokens"
    if not call.delta_rule:
        return "no delta rule"
    if v.dtype != torch.bfloat16:
        return f"values of {v.dtype}"
    if (q.shape[2], v.shape[2]) != (WIDTH, WIDTH):
        return f"keys of {q.shape[2]} and values of {v.shape[2]}"
    return None


def loaded(package: Package) -> Any:
    """The library, without a look at what is installed where it is here already."""
    return sys.modules.get(package.module) or package.load()


def state_backend(
    name: str,
    package: Package,
    attend: Callable[[LinearAttentionCall], None],
    step: Callable[[DeltaStepCall], None],
    why_own: Callable[[LinearAttentionCall], str | None],
) -> Backend:
    """The device's own ops, but for prompts that ``kernel`` runs.

    Args:
        name: of the backend.
        package: the library.
        attend, step: run on checked calls, never on an empty batch.
        why_own: why a call is the device's own kernels', or None.
    """

    def launch(*tensors: Any, **options: Any) -> None:
        call = LinearAttentionCall(*tensors, **options)
        if why_own(call) is not None:
            BACKEND_OPS["default"].linear_attention(*tensors, **options)
            return
        check_linear_attention(call)
        with _on(call.v.device):
            attend(call)

    def launch_step(*tensors: Any, **options: Any) -> None:
        call = DeltaStepCall(*tensors, **options)
        if call.max_query_len == 1:
            BACKEND_OPS["default"].delta_step(*tensors, **options)
            return
        check_delta_step(call)
        with _on(call.x.device):
            if why_own(call.parts()[2]) is None:
                step(call)
            else:
                BACKEND_OPS["default"].delta_step(*tensors, **options)

    class LibrarySession(SemaphoreSession):
        """Loads the library, so that one that can't be used is refused here."""

        def _open(self, specs: Sequence[AttentionSpec]) -> None:
            package.load()
            super()._open(specs)

    return Backend(
        name,
        replace(
            triton_kernels.CAPABILITIES,
            device_types=("cuda",),
            min_compute_capability=PROVED,
            further=_further,
        ),
        defined(
            f"torchpaged_{name}",
            **{
                op: (SCHEMAS[op], apart_from_modes(run), FAKES[op])
                for op, run in (("linear_attention", launch), ("delta_step", launch_step))
            },
        ),
        lambda: package.unavailable() or triton_kernels.unavailable(),
        session=LibrarySession,
    )


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """What kernels of Python are launched within."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _further(spec: AttentionSpec) -> list[str]:
    """What Triton's kernels say; and GPUs on which the library was not proved."""
    reasons = triton_kernels.further(spec)
    if spec.device.type == "cuda" and torch.cuda.is_available():
        have = torch.cuda.get_device_capability(spec.device)
        if have > PROVED:
            reasons = [*reasons, f"compute capability {have} is not {PROVED}, where its library was proved"]
    return reasons
