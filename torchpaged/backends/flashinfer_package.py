"""FlashInfer's package, for ``flashinfer`` and ``flashinfer_xqa``: whether it is here, and its version."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any

import torch

from torchpaged.custom_ops.errors import BackendUnavailableError

PACKAGE = "flashinfer"
OLDEST, NEWEST = (0, 6, 13), (0, 8)  # NEWEST: the first one that is not supported any more
INSTALL = "pip install 'flashinfer-python>=0.6.13,<0.8'"


def installed() -> tuple[int, ...] | None:
    """The version of the package, or None. Does not import it."""
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        text = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdecimal())


def unavailable() -> str | None:
    """Why the backend can't run here, or None. Does not import the package."""
    return missing() or (None if torch.cuda.is_available() else "no CUDA device is visible")


def missing() -> str | None:
    """What keeps the package from being used, or None. Does not import it."""
    version = installed()
    if version is None:
        return f"flashinfer is not installed; {INSTALL}"
    if not OLDEST <= version < NEWEST:
        shown = ".".join(map(str, version)) or "of an unknown version"
        return f"flashinfer {shown} is installed, 0.6.13 to 0.7 are supported; {INSTALL}"
    return None


def load(name: str = PACKAGE) -> Any:
    """The package, for the backend ``name``.

    Raises:
        BackendUnavailableError: it is not here, of another version, or does not import; with the reason.
    """
    why = missing()
    if why:
        raise BackendUnavailableError(f"backend {name!r} is not usable here: {why}")
    try:
        library = importlib.import_module(PACKAGE)
        importlib.import_module(f"{PACKAGE}.decode")
    except Exception as error:  # what it needs besides may be missing, or be of another CUDA version
        raise BackendUnavailableError(
            f"backend {name!r} is not usable here: it does not import: {error}; {INSTALL}"
        ) from error
    return library
