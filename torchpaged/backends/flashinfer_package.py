"""FlashInfer's package, for ``flashinfer`` and ``flashinfer_xqa``: whether it is here, and its version."""

import importlib.metadata
import importlib.util
from collections.abc import Callable

from torchpaged.backends.package import Package

OLDEST, NEWEST = (0, 6, 13), (0, 8)  # NEWEST: the first one that is not supported any more
INSTALL = "pip install 'flashinfer-python>=0.6.13,<0.8'"


def at_least(oldest: tuple[int, int, int]) -> Callable[[], str | None]:
    """What says whether FlashInfer of this version or later is here."""

    def missing() -> str | None:
        first = ".".join(map(str, oldest))
        install = f"pip install 'flashinfer-python>={first},<0.8'"
        if importlib.util.find_spec("flashinfer") is None:
            return f"flashinfer is not installed; {install}"
        try:
            text = importlib.metadata.version("flashinfer-python")
        except importlib.metadata.PackageNotFoundError:
            text = ""
        version = tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdecimal())
        if not oldest <= version < NEWEST:
            shown = ".".join(map(str, version)) or "of an unknown version"
            return f"flashinfer {shown} is installed, {first} to 0.7 are supported; {install}"
        return None

    return missing


FLASHINFER = Package("flashinfer", "flashinfer", INSTALL, at_least(OLDEST))
DECODE = FLASHINFER._replace(module="flashinfer.decode")
