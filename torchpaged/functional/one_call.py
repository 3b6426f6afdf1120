"""One eager call with handles that the caller gave: the backend that they belong to, held to what it
declares, and, if it plans and the caller keeps no workspace, a session for this call alone.

    backend = able_backend(ops, spec)
    session = planned_once(backend, spec, OneCall(...), num_tokens, k_cache)
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor

from torchpaged.backends import AttentionSpec, Backend, Limits, Session, backend_of
from torchpaged.backends.ops_choice import registered
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.errors import BackendUnavailableError


class _Handles:
    """A backend's handles as a dictionary's key: the same only if they are the same object."""

    def __init__(self, ops: BackendOps) -> None:
        self.ops = ops

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Handles) and other.ops is self.ops

    def __hash__(self) -> int:
        return id(self.ops)


def able_backend(ops: BackendOps, spec: AttentionSpec) -> Backend | None:
    """The backend of these handles; None if no backend has them.

    Raises:
        BackendUnavailableError: it declares not to run ``spec``; with all reasons.
    """
    return _able(_Handles(ops), spec, registered())


@functools.lru_cache(maxsize=1024)
def _able(handles: _Handles, spec: AttentionSpec, registered: tuple[Any, ...]) -> Backend | None:
    """Runs once per kind of call and set of registered backends: a refusal is not kept."""
    backend = backend_of(handles.ops)
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
