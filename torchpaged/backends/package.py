"""The package behind a backend: whether it is here, and its load; and FlashInfer's, which several backends
use.

PACKAGE = Package("flash_attn", "flash_attn_interface", "pip install ...", _missing, {"function": ("a", "b")})
PACKAGE.unavailable()   # a sentence, or None; loads no kernels
PACKAGE.load()          # the module, or BackendUnavailableError with the sentence
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchpaged.custom_ops.errors import BackendUnavailableError


class Package(NamedTuple):
    """What a backend imports where it is used.

    Attributes:
        backend: the backend's name.
        module: what is imported.
        install: how to get it.
        missing: says what keeps the package from being used, or None, without loading its kernels.
        needed: parameters of its functions, by their names, without which it is another package, or too old.
    """

    backend: str
    module: str
    install: str
    missing: Callable[[], str | None]
    needed: Mapping[str, Sequence[str]] = {}

    def unavailable(self) -> str | None:
        """Why the backend can't run here, or None. Does not load the package's kernels."""
        return self.missing() or (None if torch.cuda.is_available() else "no CUDA device is visible")

    def load(self) -> Any:
        """The module, whose kernels this loads.

        Raises:
            BackendUnavailableError: it is not here, or not of the interface that is needed; with the reason.
        """
        why = self.missing()
        if why is None:
            try:
                library = importlib.import_module(self.module)
            except Exception as error:  # a library of another CUDA or torch version fails in ways of its own
                raise self._unusable(f"{self.module} does not load: {error}; {self.install}") from error
            why = self._lacks(library)
        if why is not None:
            raise self._unusable(why)
        return library

    def _lacks(self, library: Any) -> str | None:
        for function, needed in self.needed.items():
            if not hasattr(library, function):
                return f"{self.module} has no {function}; {self.install}"
            if lacking := parameters_lacking(getattr(library, function), needed):
                return f"{function} of {self.module} lacks {lacking}; {self.install}"
        return None

    def loaded(self) -> Any:
        """`load`, without a look at what is installed where the module is here already."""
        return sys.modules.get(self.module) or self.load()

    def _unusable(self, why: str) -> BackendUnavailableError:
        return BackendUnavailableError(f"backend {self.backend!r} is not usable here: {why}")


def parameters_lacking(function: Any, needed: Sequence[str]) -> str:
    """Those of ``needed`` that a library's function does not take, for a message."""
    known = inspect.signature(function).parameters
    return ", ".join(name for name in needed if name not in known)


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
