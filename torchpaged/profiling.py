"""NVTX ranges: what the host does, by name, beside the kernels in Nsight Systems.

    TORCHPAGED_NVTX=1 nsys profile --trace=cuda,nvtx --cuda-graph-trace=node python serve.py     # the whole process

    with torchpaged.profiling.enabled():                                                         # or a part of it
        generator.step()

The ranges stand in the domain "torchpaged"; docs/profiling.md lists them. The variable is read once, when this module is
imported. Off, the nvtx package is not even imported, and `range` returns one shared object that does nothing. Host code only:
a range inside a traced function would break its graph, and inside a captured one it would appear once and never at replay.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torchpaged import env
from torchpaged.custom_ops.errors import TorchpagedError

DOMAIN = "torchpaged"


class ProfilingUnavailableError(TorchpagedError, RuntimeError):
    """Ranges were asked for and can't be had; the message says why and what to do."""


class _Nothing:
    """The range of a process that is not profiled."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


class _Range:
    """One range, pushed and popped in the domain it was made for, even if profiling ends in between."""

    __slots__ = ("_domain", "_message", "_number")

    def __init__(self, domain: Any, message: str, number: int | None) -> None:
        self._domain, self._message, self._number = domain, message, number

    def __enter__(self) -> None:
        self._domain.push_range(self._domain.get_event_attributes(message=self._message, payload=self._number))

    def __exit__(self, *error: object) -> None:
        self._domain.pop_range()


NOTHING = _Nothing()
_domain: Any = None  # the nvtx domain while on


def range(name: str, number: int | None = None, /, **payload: object) -> AbstractContextManager[None]:
    """A context manager around host work.

    An NVTX event holds one number, so that ``payload`` becomes text: ``range("decode", batch=3, tokens=3)`` shows as
    "decode batch=3 tokens=3". The nvtx package keeps every message it has seen, and tools sum the time per message; what
    differs in every range, such as the number of a step, therefore goes into ``number``.

    Args:
        name: what is being done.
        number: the event's numeric payload, int64.
        payload: facts about it, in the order given. Few different values.

    Returns:
        While off, always the same object, which does nothing.
    """
    if _domain is None:
        return NOTHING
    return _Range(_domain, " ".join([name, *(f"{key}={value}" for key, value in payload.items())]), number)


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Ranges are on inside the block, in every thread; may be nested. Without a tool such as nsys they go nowhere.

    Raises:
        ProfilingUnavailableError: the nvtx package is missing or switched off.
    """
    global _domain
    before, _domain = _domain, _open("torchpaged.profiling.enabled()")
    try:
        yield
    finally:
        _domain = before


def _open(asked_by: str) -> Any:
    if os.environ.get("NVTX_DISABLE"):
        raise ProfilingUnavailableError(f"{asked_by}: NVTX_DISABLE is set, which switches the nvtx package off; unset one of them")
    try:
        import nvtx
    except ImportError as error:
        raise ProfilingUnavailableError(f"{asked_by}: the nvtx package is missing; pip install 'torchpaged[profiling]'") from error
    return nvtx.get_domain(DOMAIN)


if env.get("TORCHPAGED_NVTX"):
    _domain = _open("TORCHPAGED_NVTX=1")
