"""FlashInfer's package, for ``flashinfer`` and ``flashinfer_xqa``: whether it is here, and its version."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from torchpaged.backends.package import Package

OLDEST, NEWEST = (0, 6, 13), (0, 8)  # NEWEST: the first one that is not supported any more
INSTALL = "pip install 'flashinfer-python>=0.6.13,<0.8'"


def _missing() -> str | None:
    if importlib.util.find_spec("flashinfer") is None:
        return f"flashinfer is not installed; {INSTALL}"
    try:
        text = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        text = ""
    version = tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdecimal())
    if not OLDEST <= version < NEWEST:
        shown = ".".join(map(str, version)) or "of an unknown version"
        return f"flashinfer {shown} is installed, 0.6.13 to 0.7 are supported; {INSTALL}"
    return None


FLASHINFER = Package("flashinfer", "flashinfer", INSTALL, _missing)
DECODE = FLASHINFER._replace(module="flashinfer.decode")
