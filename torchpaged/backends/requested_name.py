"""The name of the backend that was asked for, by the caller's block or by the environment."""

from __future__ import annotations

import torch

from torchpaged.backends import selector
from torchpaged.custom_ops.errors import BackendUnavailableError


def requested_name(
    device_type: str,
    dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    features: str = "",
) -> str:
    """The backend that was asked for by name, or "default"; the rest as in `traced_ops`."""
    name, asker = selector.requested(None)
    if name == "auto" or device_type == "meta":
        return "default"
    backend = selector.get_backend(name)
    missing, known = backend.unavailable(), backend.capabilities.device_types
    reasons = [missing] if missing else []
    if device_type not in known:
        reasons.append(f"device {device_type} is not one of {', '.join(known)}")
    if dtype is not None and kv_dtype is not None:
        reasons += backend.capabilities.reject_kind(dtype, kv_dtype, features.split())
    if reasons:
        raise BackendUnavailableError(f"backend {name!r} ({asker}) cannot run this: {'; '.join(reasons)}")
    return name
