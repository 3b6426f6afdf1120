"""The backend of one call of a function of `torchpaged.functional`: the one that its caller's handles are of,
or the one that every other entry point would choose.

    ops = choose_ops(Kind.of(call))         # an attention, or with Kind.written a write for one
    ops = device_ops(q.device)              # an op that no attention's features bear on
    ops, backend, spec = serving(kind, ops)         # eagerly, with what is needed to plan
    session = planned_once(backend, spec, call)     # for this call alone

`choose_ops` and `device_ops` serve eager and traced calls. The code of a traced one keeps what was chosen
then.
"""

import functools
from typing import Any, NamedTuple

import torch

from torchpaged.backends.base import Backend
from torchpaged.backends.choose import names
from torchpaged.backends.choose.kind import Kind
from torchpaged.backends.choose.select import backend_of, select_backend
from torchpaged.backends.session import Session
from torchpaged.backends.spec import AttentionSpec, Limits
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.attention.call import AttentionCall

_DEFAULT = BACKEND_OPS["default"]


class Serving(NamedTuple):
    """What serves a call: handles, their backend, None for the device's own handles and for those of no
    backend, and what it was asked."""

    ops: BackendOps
    backend: Backend | None
    spec: AttentionSpec


def choose_ops(kind: Kind, ops: BackendOps | None = None, planned: bool = False) -> BackendOps:
    """The handles that run an attention.

    Args:
        kind: of the attention.
        ops: handles that were given, to be held to what their backend declares; None: those of the backend
            that `select_backend` chooses.
        planned: whether a session's workspace is given, or nothing needs a plan; it matters in a trace.

    Raises:
        BackendUnavailableError: the backend can't serve the call, or none can, or in a trace it plans each
            batch and has no workspace; with all reasons.
    """
    if not torch.compiler.is_compiling():
        return serving(kind, ops).ops
    # Here: its decorators import the compiler, which a trace has done already.
    from torchpaged.backends.choose.traced import traced_name

    name = traced_name(kind[:], ops, planned)  # not every Dynamo gives a named tuple back
    return _ops_named(name) if ops is None else ops


def device_ops(device: torch.device) -> BackendOps:
    """The handles that run what is no attention: the device's own, unless a backend was asked for by name.

    Raises:
        BackendUnavailableError: that one does not exist here, or does not know the device.
    """
    if not torch.compiler.is_compiling():
        return _ops_named(names.requested_name(device.type))
    from torchpaged.backends.choose.traced import traced_requested

    return _ops_named(traced_requested(device.type))


def _ops_named(name: str) -> BackendOps:
    """Of "default", or of a backend that was asked for before: names can be constants of a trace."""
    if name in BACKEND_OPS:
        return BACKEND_OPS[name]
    return (names.REGISTERED if name in names.REGISTERED else names.LOADED)[name].ops


def serving(kind: Kind, ops: BackendOps | None = None) -> Serving:
    """What runs an eager attention; found once per kind of call. A refusal is not kept."""
    asked = None if ops is not None else names.requested(None)
    registered = tuple(names.REGISTERED.values())
    # equal handles of two backends are two keys: what is kept keeps the object, and so its id
    return _serving(kind, ops, asked, tuple(names.AUTOMATIC), registered, id(ops))


@functools.lru_cache(maxsize=1024)
def _serving(kind: Kind, ops: BackendOps | None, *follows_from: Any) -> Serving:
    """Keyed by all that the choice follows from."""
    spec = kind.spec()
    if ops is not None:
        return Serving(ops, None if ops == _DEFAULT else backend_of(ops, spec), spec)
    if spec.device.type == "meta":  # no kernel runs there
        return Serving(_DEFAULT, None, spec)
    backend = select_backend(spec).backend
    return Serving(backend.ops, backend, spec)


def planned_once(backend: Backend, spec: AttentionSpec, call: AttentionCall) -> Session:
    """A session for one call. The op is launched behind the plan, on the same stream, and its tensors are
    freed there."""
    num_reqs, width = call.block_table.shape
    most_tokens = max(num_reqs * call.max_query_len, call.q.shape[0], 1)
    limits = Limits(max(num_reqs, 1), most_tokens, max(width, 1), *call.k_cache.shape[:2])
    session = backend.open([spec], limits, spec.device)
    session.plan(call)
    return session
