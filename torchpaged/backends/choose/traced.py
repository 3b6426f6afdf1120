"""The choice of a backend for a call that is being traced: what `select_backend` would choose, or refuse.

The compiled code keeps what was chosen. Constants alone can be asked of in a trace, see `Kind`. Imported in a
trace alone: `torch.compiler.assume_constant_result` imports torch's compiler.
"""

from typing import Any

import torch

from torchpaged.backends.capabilities import Planning
from torchpaged.backends.choose.kind import Kind
from torchpaged.backends.choose.names import requested, requested_name
from torchpaged.backends.choose.select import backend_of, select_backend
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.errors import BackendUnavailableError

traced_requested = torch.compiler.assume_constant_result(requested_name)


@torch.compiler.assume_constant_result
def traced_name(kind: tuple[Any, ...], ops: BackendOps | None, planned: bool) -> str:
    """The name of the backend to run, or "default" where the device's own kernels are what was chosen.

    Args:
        kind: the fields of a `Kind`.
        ops: handles that were given; they are held to what their backend declares, and the name is no matter.
        planned: whether a session's workspace is given, or nothing needs a plan.

    Raises:
        BackendUnavailableError: the backend that was asked for can't run this, or none can, or the one that
            was chosen plans each batch, which a trace can't; with all reasons.
    """
    spec = Kind(*kind).spec()
    device = spec.device.type
    if device == "meta":
        return "default" if ops is not None else requested_name(device)
    backend = backend_of(ops, spec) if ops is not None else select_backend(spec).backend
    if backend is None:
        return "default"
    if backend.capabilities.planning > Planning.NEVER and not planned:
        raise BackendUnavailableError(
            f"backend {backend.name!r} plans its batches, which compiled code can't: open a session, call "
            "session.plan(batch) before the compiled call, and give it workspace=session.workspace(spec)"
        )
    by_name = requested(None)[0] != "auto"
    own = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}.get(device, ())
    return backend.name if by_name or backend.name not in own else "default"
