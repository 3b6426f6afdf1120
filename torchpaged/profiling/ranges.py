"""Ranges: what the host does, by name, next to the kernels in Nsight Systems (NVTX) and in traces
of torch.profiler.

    # the whole process
    TORCHPAGED_NVTX=1 nsys profile --trace=cuda,nvtx --cuda-graph-trace=node python serve.py

    with torchpaged.profiling.enabled():                                               # NVTX for a part of it
        generator.step()
    with torchpaged.profiling.trace("out.json"):                              # a Chrome trace of a part of it
        generator.step()

The NVTX ranges stand in the domain "torchpaged"; docs/profiling.md lists them. The variable is read once,
when this module is imported. Off, the nvtx package is not even imported, and `range` returns one shared
object that does nothing. Host code only: a range inside a traced function would break its graph, and inside a
captured one it would appear once and never at replay. Attention has its ranges inside the op, where compiled
code comes by too.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from torchpaged.custom_ops import launches, variables
from torchpaged.custom_ops.errors import ArgumentError, TorchpagedError

DOMAIN = "torchpaged"


class ProfilingUnavailableError(TorchpagedError, RuntimeError):
    """Ranges were asked for and can't be had; the message says why and what to do."""


class _Range:
    """One range, closed wherever it was opened, even if profiling ends in between."""

    __slots__ = ("_domain", "_message", "_number", "_record")

    def __init__(
        self, domain: Any, record: torch.profiler.record_function | None, message: str, number: int | None
    ) -> None:
        self._domain, self._record, self._message, self._number = domain, record, message, number

    def __enter__(self) -> None:
        if self._domain is not None:
            self._domain.push_range(
                self._domain.get_event_attributes(message=self._message, payload=self._number)
            )
        if self._record is not None:
            self._record.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._record is not None:
            self._record.__exit__(None, None, None)
        if self._domain is not None:
            self._domain.pop_range()


NOTHING = contextlib.nullcontext()
_domain: Any = None  # the nvtx domain while NVTX ranges are on
_enabled = 0  # blocks of `enabled` that are open
_traces = 0  # blocks of `recorded` that are open
_on = False  # either of them
_switching = threading.Lock()
_here = threading.local()  # .named: this thread is inside a range of `ranged_attention`


def range(name: str, number: int | None = None, /, **payload: object) -> AbstractContextManager[None]:
    """A context manager around host work.

    An NVTX event holds one number, and one of torch.profiler a name only, so that ``payload`` becomes text:
    ``range("decode", batch=3, tokens=3)`` shows as "decode batch=3 tokens=3". The nvtx package keeps every
    message it has seen, and tools sum the time per message; what differs in every range, such as the number
    of a step, therefore goes into ``number``.

    Args:
        name: what is being done.
        number: the NVTX event's numeric payload, int64; a trace of torch.profiler has none.
        payload: facts about it, in the order given. Few different values.

    Returns:
        While off, always the same object, which does nothing.
    """
    if not _on:
        return NOTHING
    message = " ".join([name, *(f"{key}={value}" for key, value in payload.items())])
    return _Range(_domain, torch.profiler.record_function(message) if _traces else None, message, number)


def is_on() -> bool:
    """Whether ranges go anywhere: for callers that would do work to name one."""
    return _on


def ranged_attention(attend: Callable[..., Any], layer: int) -> Callable[..., Any]:
    """``attend`` inside the range ``attention layer=``: for callers that run as Python, whose op may be C++
    and have no range of its own."""

    def run(*arguments: Any, **options: Any) -> Any:
        with range("attention", layer=layer):
            _here.named = True
            try:
                return attend(*arguments, **options)
            finally:
                _here.named = False

    return run


def _around_op(op: str, arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
    """The range of an op written in Python: that of attention, named after the layer whose keys it
    was given."""
    if op != "paged_attention" or getattr(_here, "named", False):
        return NOTHING
    layer = getattr(arguments[1], "_torchpaged_layer", None)  # set by torchpaged.hf.layer.PagedLayer.adopt
    return range("attention") if layer is None else range("attention", layer=layer.index)


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """NVTX ranges are on inside the block, in every thread; may be nested. Without a tool such as nsys they
    go nowhere.

    Raises:
        ProfilingUnavailableError: the nvtx package is missing or switched off.
    """
    _switch(enabled=1, domain=_open("torchpaged.profiling.enabled()"))
    try:
        yield
    finally:
        _switch(enabled=-1)


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Ranges are also `torch.profiler.record_function` ranges inside the block, for a profiler of your own;
    may be nested."""
    _switch(traces=1)
    try:
        yield
    finally:
        _switch(traces=-1)


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[torch.profiler.profile]:
    """Profile the block with torch.profiler and write a Chrome trace that has our ranges in it, also if the
    block fails.

    Args:
        path: the file, for https://ui.perfetto.dev or chrome://tracing; ".gz" at its end compresses
            it. Overwritten.

    Yields:
        The profiler.

    Raises:
        ArgumentError: no file can be written there; nothing is run then.
    """
    check_writable(path)
    profiler = torch.profiler.profile(acc_events=True)  # CPU and GPU; False warns that cycles are forgotten
    profiler.start()
    try:
        with recorded():
            yield profiler
    finally:
        profiler.stop()
        profiler.export_chrome_trace(os.fspath(path))


def check_writable(path: str | os.PathLike[str], argument: str = "path") -> None:
    """Refuse a path that `trace` could not write to, before the work is done; ``argument`` is its name in
    the error.

    Raises:
        ArgumentError: its folder does not exist, it is a folder, or it may not be written.
    """
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ArgumentError(argument, "a file in a folder that exists", repr(os.fspath(path)))
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise ArgumentError(argument, "a file that can be written", repr(os.fspath(path)))


def _switch(enabled: int = 0, traces: int = 0, domain: Any = None) -> None:
    """So many more blocks are open, in any thread; ``domain`` is that of a first one of `enabled`."""
    global _domain, _enabled, _traces, _on
    with _switching:
        _enabled, _traces = _enabled + enabled, _traces + traces
        _domain = (_domain or domain) if _enabled else None
        _on = _domain is not None or _traces > 0
        launches.around = _around_op if _on else None


def _open(asked_by: str) -> Any:
    if os.environ.get("NVTX_DISABLE"):
        raise ProfilingUnavailableError(
            f"{asked_by}: NVTX_DISABLE is set, which switches the nvtx package off; unset one of them"
        )
    try:
        import nvtx
    except ImportError as error:
        raise ProfilingUnavailableError(
            f"{asked_by}: the nvtx package is missing; pip install 'torchpaged[profiling]'"
        ) from error
    domain = nvtx.get_domain(DOMAIN)
    # Since 0.2.12 the package asks nvtxDomainIsEnabled, and hands out a domain that does nothing where a tool
    # says no. Nsight Systems 2023.4 and 2024.2 cannot answer and count as "no", though they record every
    # range: with a tool injected, the domain's real class is made past that question. A tool that leaves the
    # domain out on purpose drops what is pushed into it.
    if os.environ.get("NVTX_INJECTION64_PATH") and type(domain).__name__ == "DummyDomain":
        domain = _domain_unasked()
    return domain


@functools.cache
def _domain_unasked() -> Any:
    from nvtx._lib import lib  # private: tests/profiling/test_profiling.py notices a change

    domain = object.__new__(lib.Domain)
    domain.handle = lib.DomainHandle(DOMAIN)
    domain.__init__(DOMAIN)
    return domain


if variables.get("TORCHPAGED_NVTX"):
    _switch(enabled=1, domain=_open("TORCHPAGED_NVTX=1"))
