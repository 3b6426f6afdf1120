"""Whose kernels a function of `torchpaged.functional` runs if its caller did not say: what every other door
would choose.

    ops = choose_ops(q.device, attention_spec(...))     # an attention, or a write for one
    ops = choose_ops(device)                            # an op that no attention's features bear on
    ops = traced_ops(device)                            # the same, while a call is traced
    ops = traced_ops(q.device, (dtype, ...))            # an attention
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchpaged.backends import selector
from torchpaged.backends.base import Backend
from torchpaged.backends.requested_name import requested_name
from torchpaged.backends.spec import AttentionSpec
from torchpaged.backends.tuned import state
from torchpaged.custom_ops import BACKEND_OPS, BackendOps


class _Same:
    """A backend as a dictionary's key: the same only if it is the same object."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.backend is self.backend

    def __hash__(self) -> int:
        return id(self.backend)


def choose_ops(device: torch.device, spec: AttentionSpec | None = None) -> BackendOps:
    """The handles of the backend that `select_backend` chooses for ``spec``; found once per kind of call.

    Args:
        device: where the call runs.
        spec: the attention; None: one that was asked for by name must exist here and know the device, else
            the device's own kernels run.

    Raises:
        BackendUnavailableError: the backend that was asked for can't serve the call, or none can; with
            all reasons.
    """
    if spec is None or device.type == "meta":  # on meta no kernel runs
        return _named(device.type)
    return _chosen(spec, *selector.requested(None), tuple(selector.AUTOMATIC), registered(), state())


def registered() -> tuple[_Same, ...]:
    """The backends that were registered until now, as a part of a dictionary's key."""
    return tuple(map(_Same, list(selector._REGISTERED.values())))  # another thread may register one


@functools.lru_cache(maxsize=1024)
def _chosen(
    spec: AttentionSpec,
    name: str,
    asker: str,
    order: tuple[str, ...],
    others: tuple[_Same, ...],
    tuned: tuple[str, str, int],
) -> BackendOps:
    """Keyed by all that the choice follows from. A refusal is not kept."""
    return selector.select_backend(spec).backend.ops


def _named(device_type: str) -> BackendOps:
    name = requested_name(device_type)
    return BACKEND_OPS["default"] if name == "default" else selector.get_backend(name).ops


def traced_ops(
    device: torch.device,
    attention: tuple[Any, ...] | None = None,
    ops: BackendOps | None = None,
    planned: bool = False,
) -> BackendOps:
    """As `choose_ops`, while a call is traced: the compiled code keeps what was chosen then.

    Args:
        device: where the call runs.
        attention: fields of `TracedAttention` in their order, all constants; None as in `choose_ops`.
        ops: handles that were given, to be held to what their backend declares; None: choose.
        planned: whether a session's workspace is given, or nothing needs a plan.

    Raises:
        BackendUnavailableError: as `choose_ops`; or a backend that plans, and no workspace.
    """
    # Here: its decorators import the compiler, which a trace has done already.
    from torchpaged.backends.traced_name import refuse_traced, traced_name

    if ops is not None:
        if attention is not None:
            refuse_traced(ops, device, attention, planned)
        return ops
    name = traced_name(device, attention, planned)  # names can be constants of a trace
    if name in BACKEND_OPS:
        return BACKEND_OPS[name]
    return (selector._REGISTERED if name in selector._REGISTERED else selector._LOADED)[name].ops
