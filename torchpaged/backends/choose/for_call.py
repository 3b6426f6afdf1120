"""The backend of one call of a function of `torchpaged.functional`: the one that its caller's handles are of,
or the one that every other door would choose.

    ops = choose_ops(q.device, Kind.of(call))           # an attention, or with Kind.written a write for one
    ops = choose_ops(device)                            # an op that no attention's features bear on
    ops, backend, spec = serving(q.device, kind, ops)   # eagerly, with what is needed to plan
    session = planned_once(backend, spec, OneCall(...), num_tokens, k_cache)    # for this call alone

`choose_ops` serves eager and traced calls. The code of a traced one keeps what was chosen then.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.backends.base import Backend
from torchpaged.backends.choose import names
from torchpaged.backends.choose.kind import Kind
from torchpaged.backends.choose.select import select_backend
from torchpaged.backends.choose.tuned import state
from torchpaged.backends.session import Limits, Session
from torchpaged.backends.spec import AttentionSpec
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.errors import BackendUnavailableError

_DEFAULT = BACKEND_OPS["default"]


class _Same:
    """An object as a dictionary's key: the same only if it is the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Serving(NamedTuple):
    """What serves a call: handles, their backend, None for the device's own handles and for those of no
    backend, and what it was asked."""

    ops: BackendOps
    backend: Backend | None
    spec: AttentionSpec


def choose_ops(
    device: torch.device, kind: Kind | None = None, ops: BackendOps | None = None, planned: bool = False
) -> BackendOps:
    """The handles that run a call.

    Args:
        device: where the call runs.
        kind: of the attention; None: a backend that was asked for by name must exist here and know the
            device, else the device's own kernels run.
        ops: handles that were given, to be held to what their backend declares; None: those of the backend
            that `select_backend` chooses.
        planned: whether a session's workspace is given, or nothing needs a plan; it matters in a trace.

    Raises:
        BackendUnavailableError: the backend can't serve the call, or none can, or in a trace it plans each
            batch and has no workspace; with all reasons.
    """
    if torch.compiler.is_compiling():
        return _traced(device, kind, ops, planned)
    if kind is not None:
        return serving(device, kind, ops).ops
    if ops is not None:
        return ops
    name = names.requested_name(device.type)
    return _DEFAULT if name == "default" else names.get_backend(name).ops


def serving(device: torch.device, kind: Kind, ops: BackendOps | None = None) -> Serving:
    """`choose_ops` for an eager attention; found once per kind of call. A refusal is not kept."""
    if ops is not None:
        return _given(_Same(ops), device, kind, _registered())
    asked = names.requested(None)
    return _chosen(device, kind, asked, tuple(names.AUTOMATIC), _registered(), state())


def _registered() -> tuple[_Same, ...]:
    """The backends that were registered until now."""
    return tuple(map(_Same, list(names.REGISTERED.values())))  # another thread may register one


@functools.lru_cache(maxsize=1024)
def _chosen(device: torch.device, kind: Kind, *follows_from: Any) -> Serving:
    """Keyed by all that the choice follows from."""
    spec = kind.spec(device)
    if device.type == "meta":  # no kernel runs there
        return Serving(_DEFAULT, None, spec)
    backend = select_backend(spec).backend
    return Serving(backend.ops, backend, spec)


@functools.lru_cache(maxsize=1024)
def _given(handles: _Same, device: torch.device, kind: Kind, registered: tuple[_Same, ...]) -> Serving:
    ops, spec = handles.value, kind.spec(device)
    backend = None if ops is _DEFAULT else names.backend_of(ops)
    reasons = [] if backend is None else backend.capabilities.reject(spec)
    if backend is not None and reasons:
        raise BackendUnavailableError(
            f"backend {backend.name!r} (its ops were given) cannot run this attention: {'; '.join(reasons)}"
        )
    return Serving(ops, backend, spec)


def _traced(device: torch.device, kind: Kind | None, ops: BackendOps | None, planned: bool) -> BackendOps:
    # Here: its decorators import the compiler, which a trace has done already.
    from torchpaged.backends.choose.traced import refuse_traced, traced_name

    constants = None if kind is None else kind[:]  # not every Dynamo gives a named tuple back
    if ops is not None:
        if constants is not None:
            refuse_traced(ops, device, constants, planned)
        return ops
    name = traced_name(device, constants, planned)  # names can be constants of a trace
    if name in BACKEND_OPS:
        return BACKEND_OPS[name]
    return (names.REGISTERED if name in names.REGISTERED else names.LOADED)[name].ops


# -------------------------------------------------------------------------------------- a plan for one call
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
