"""Whose kernels a function of `torchpaged.functional` runs if its caller did not say: what every other door
would choose.

ops = choose_ops(q.device, attention_spec(...))     # an attention, or a write for one
ops = choose_ops(device)                            # an op that no attention's features bear on
ops = traced_ops(device.type)                       # the same, while a call is traced
ops = traced_ops(device.type, q.dtype, k_cache.dtype, "window lse")  # an attention with these features
"""

from __future__ import annotations

import functools

import torch

from torchpaged.backends import selector
from torchpaged.backends.base import Backend
from torchpaged.backends.requested_name import requested_name
from torchpaged.backends.spec import AttentionSpec
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
    registered = tuple(map(_Same, list(selector._REGISTERED.values())))  # another thread may register one
    return _chosen(spec, *selector.requested(None), tuple(selector.AUTOMATIC), registered)


@functools.lru_cache(maxsize=1024)
def _chosen(
    spec: AttentionSpec, name: str, asker: str, order: tuple[str, ...], registered: tuple[_Same, ...]
) -> BackendOps:
    """Keyed by all that the choice follows from. A refusal is not kept."""
    return selector.select_backend(spec).backend.ops


def _named(device_type: str) -> BackendOps:
    name = requested_name(device_type)
    return BACKEND_OPS["default"] if name == "default" else selector.get_backend(name).ops


def traced_ops(
    device_type: str,
    dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    features: str = "",
) -> BackendOps:
    """As `choose_ops`, while a call is traced: the compiled code keeps what was chosen then. Sizes may be
    symbols there, so they are not asked.

    Args:
        device_type: where the call runs.
        dtype, kv_dtype: of an attention's queries and pools; None for other ops.
        features: what the attention uses of `capabilities.FEATURES`, with spaces between.

    Raises:
        BackendUnavailableError: the backend that was asked for by name declares not to run this.
    """
    from torchpaged.backends.traced_name import (
        traced_name,
    )  # here: its decorator imports the compiler, which a trace has done already

    name = traced_name(
        device_type, dtype, kv_dtype, features
    )  # handles can't be constants of a trace, names can
    return BACKEND_OPS[name] if name in BACKEND_OPS else selector._REGISTERED[name].ops
