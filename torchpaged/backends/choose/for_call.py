"""The backend of one call of a function of `torchpaged.functional`: the one that its caller's handles are of,
or the one that every other door would choose.

    ops = choose_ops(q.device, attention_spec(...))     # an attention, or a write for one
    ops = choose_ops(device)                            # an op that no attention's features bear on
    ops = traced_ops(device)                            # the same, while a call is traced
    ops = traced_ops(q.device, (dtype, ...))            # an attention
    backend = able_backend(ops, spec)                   # handles that were given
    session = planned_once(backend, spec, OneCall(...), num_tokens, k_cache)    # for this call alone
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.backends.base import Backend
from torchpaged.backends.choose import names
from torchpaged.backends.choose.select import select_backend
from torchpaged.backends.choose.tuned import state
from torchpaged.backends.session import Limits, Session
from torchpaged.backends.spec import AttentionSpec
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.errors import BackendUnavailableError


class _Same:
    """An object as a dictionary's key: the same only if it is the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


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
        name = names.requested_name(device.type)
        return BACKEND_OPS["default"] if name == "default" else names.get_backend(name).ops
    return _chosen(spec, *names.requested(None), tuple(names.AUTOMATIC), _registered(), state())


def _registered() -> tuple[_Same, ...]:
    """The backends that were registered until now."""
    return tuple(map(_Same, list(names.REGISTERED.values())))  # another thread may register one


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
    return select_backend(spec).backend.ops


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
    from torchpaged.backends.choose.traced import refuse_traced, traced_name

    if ops is not None:
        if attention is not None:
            refuse_traced(ops, device, attention, planned)
        return ops
    name = traced_name(device, attention, planned)  # names can be constants of a trace
    if name in BACKEND_OPS:
        return BACKEND_OPS[name]
    return (names.REGISTERED if name in names.REGISTERED else names.LOADED)[name].ops


# ----------------------------------------------------------------------------------- handles that were given
def able_backend(ops: BackendOps, spec: AttentionSpec) -> Backend | None:
    """The backend of these handles; None if no backend has them.

    Raises:
        BackendUnavailableError: it declares not to run ``spec``; with all reasons.
    """
    return _able(_Same(ops), spec, _registered())


@functools.lru_cache(maxsize=1024)
def _able(handles: _Same, spec: AttentionSpec, registered: tuple[_Same, ...]) -> Backend | None:
    """Runs once per kind of call and set of registered backends: a refusal is not kept."""
    backend = names.backend_of(handles.value)
    reasons = [] if backend is None else backend.capabilities.reject(spec)
    if backend is not None and reasons:
        raise BackendUnavailableError(
            f"backend {backend.name!r} (its ops were given) cannot run this attention: {'; '.join(reasons)}"
        )
    return backend


class OneCall(NamedTuple):
    """A batch to plan; see `torchpaged.backends.PlannedBatch`."""

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int


def planned_once(
    backend: Backend, spec: AttentionSpec, batch: OneCall, num_tokens: int, pool: Tensor
) -> Session:
    """A session for one call. The op is launched behind the plan, on the same stream, and its tensors are
    freed there."""
    num_reqs, width = batch.block_table.shape
    most_tokens = max(num_reqs * batch.max_query_len, num_tokens, 1)
    limits = Limits(max(num_reqs, 1), most_tokens, max(width, 1), pool.shape[0], pool.shape[1])
    session = backend.open([spec], limits, spec.device)
    session.plan(batch)
    return session
