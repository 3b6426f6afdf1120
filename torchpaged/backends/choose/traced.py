"""The choice of a backend for a call that is being traced: what `select_backend` would choose, or refuse.

The compiled code keeps what was chosen. Constants alone can be asked of in a trace, see `Kind`. Imported in a
trace alone: `torch.compiler.assume_constant_result` imports torch's compiler.
"""

from __future__ import annotations

from typing import Any

import torch

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Planning
from torchpaged.backends.choose.kind import Kind
from torchpaged.backends.choose.names import backends_with, requested, requested_name
from torchpaged.backends.choose.select import select_backend
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.errors import BackendUnavailableError


@torch.compiler.assume_constant_result
def traced_name(device: torch.device, kind: tuple[Any, ...] | None, planned: bool) -> str:
    """The name of the backend to run, or "default" where the device's own kernels are what was chosen.

    Args:
        device: where the call runs.
        kind: the fields of a `Kind`; None: an op that no attention's features bear on.
        planned: whether a session's workspace is given, or nothing needs a plan.

    Raises:
        BackendUnavailableError: the backend that was asked for can't run this, or none can, or the one that
            was chosen plans each batch, which a trace can't; with all reasons.
    """
    if kind is None or device.type == "meta":
        return requested_name(device.type)
    choice = select_backend(Kind(*kind).spec(device))
    if not planned:
        _require_no_plan(choice.backend)
    by_name = requested(None)[0] != "auto"
    own = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}.get(device.type, ())
    return choice.name if by_name or choice.name not in own else "default"


@torch.compiler.assume_constant_result
def refuse_traced(ops: BackendOps, device: torch.device, kind: tuple[Any, ...], planned: bool) -> bool:
    """Refuse handles that were given where every backend that has them declares not to run such a call.

    Equal handles count, since a trace does not tell the same object from an equal one.

    Raises:
        BackendUnavailableError: with the reasons of each.
    """
    backends = backends_with(ops)
    spec = Kind(*kind).spec(device)
    reasons = {backend.name: backend.capabilities.reject(spec) for backend in backends}
    if device.type == "meta" or not backends:
        return True
    if all(reasons.values()):
        why = "; ".join(reason for each in reasons.values() for reason in each)
        name = " or ".join(map(repr, reasons))
        raise BackendUnavailableError(f"backend {name} (its ops were given) cannot run this attention: {why}")
    if not planned:
        _require_no_plan(next(backend for backend in backends if not reasons[backend.name]))
    return True  # a constant of the trace


def _require_no_plan(backend: Backend) -> None:
    if backend.capabilities.planning > Planning.NEVER:
        raise BackendUnavailableError(
            f"backend {backend.name!r} plans its batches, which compiled code can't: open a session, call "
            "session.plan(batch) before the compiled call, and give it workspace=session.workspace(spec)"
        )
