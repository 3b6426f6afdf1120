"""The name of the backend that was asked for, by the caller's block or by the environment."""

from __future__ import annotations

from torchpaged.backends import selector
from torchpaged.custom_ops.errors import BackendUnavailableError


def requested_name(device_type: str) -> str:
    """The backend that was asked for by name, or "default".

    Raises:
        BackendUnavailableError: it is not usable here, or doesn't know the device; with all reasons.
    """
    name, asker = selector.requested(None)
    if name == "auto" or device_type == "meta":
        return "default"
    backend = selector.get_backend(name)
    missing, known = backend.unavailable(), backend.capabilities.device_types
    reasons = [missing] if missing else []
    if device_type not in known:
        reasons.append(f"device {device_type} is not one of {', '.join(known)}")
    if reasons:
        raise BackendUnavailableError(f"backend {name!r} ({asker}) cannot run this: {'; '.join(reasons)}")
    return name
