"""Which host range launched each GPU kernel, read from a Chrome trace of torch.profiler.

    with module_ranges(model):
        trace = profiled(lambda: model(input_ids))
    # "ampere_sgemm_...", "model.layers.0.self_attn.q_proj"
    trace.activities[0].name, trace.activities[0].module

The trace is the profiler's documented output and the only one with a category per event; the event list of
`prof.events()` has no launch record for kernels that start outside an op, as Triton's do. Where no GPU took
part, ops of the CPU stand for kernels: the outermost ones, such as ``aten::linear``. Host work is expected on
one thread.
"""

from __future__ import annotations

import bisect
import contextlib
import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

#: What the range of a module is called: this and the module's qualified name.
MODULE_PREFIX = "module "
#: How torch names the run of compiled code, a range in which no module is seen.
_COMPILED_PREFIX = "Torch-Compiled Region"
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})


@dataclass(frozen=True)
class Activity:
    """One kernel, copy or memset on the GPU, or one op on the CPU.

    Attributes:
        name: as the profiler gives it.
        us: how long it ran, microseconds.
        ranges: host ranges around its launch, the outermost first.
        graph: number of the graph launch it belongs to; None if it was launched alone.
        recorded: whether the profiler recorded its launch; without, ``ranges`` is empty.
    """

    name: str
    us: float
    ranges: tuple[str, ...] = ()
    graph: int | None = None
    recorded: bool = True

    @property
    def module(self) -> str | None:
        """The innermost module, by its qualified name; None outside `module_ranges`."""
        return next(
            (
                name.removeprefix(MODULE_PREFIX)
                for name in reversed(self.ranges)
                if name.startswith(MODULE_PREFIX)
            ),
            None,
        )

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code launched it, so that ``module`` is at best the module that called
        that code."""
        kinds = (
            name.startswith(_COMPILED_PREFIX)
            for name in reversed(self.ranges)
            if name.startswith((MODULE_PREFIX, _COMPILED_PREFIX))
        )
        return next(kinds, False)


@dataclass(frozen=True)
class Trace:
    """What a profiler saw.

    Attributes:
        activities: in order of start.
        ranges: names of all host ranges, in order of start.
        on_device: whether the activities are the GPU's.
    """

    activities: tuple[Activity, ...]
    ranges: tuple[str, ...]
    on_device: bool


def profiled(call: Callable[[], Any]) -> Trace:
    """Run ``call`` once under torch.profiler, to the end of its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile() as profiler:
            call()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        return read_trace(path)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """A Chrome trace file of torch.profiler, such as `torchpaged.profiling.trace` writes; ".gz" too."""
    with gzip.open(path, "rb") if os.fspath(path).endswith(".gz") else open(path, "rb") as file:
        return parse(json.load(file)["traceEvents"])


def parse(events: Sequence[dict[str, Any]]) -> Trace:
    """The ``traceEvents`` of a Chrome trace."""
    timed = sorted(
        (e for e in events if e.get("ph") == "X" and "ts" in e), key=lambda e: (e["ts"], -e["dur"])
    )
    host: dict[Any, list[dict[str, Any]]] = {}
    for event in timed:
        if event.get("cat") == "user_annotation" or (
            event.get("cat") == "cpu_op" and event["name"].startswith(_COMPILED_PREFIX)
        ):
            host.setdefault(event["tid"], []).append(event)
    nests = {thread: _Nest(ranges) for thread, ranges in host.items()}
    names = tuple(e["name"] for e in timed if e.get("cat") == "user_annotation")
    on_device = any(e.get("cat") in _ON_DEVICE for e in timed)
    return Trace(tuple(_kernels(timed, nests) if on_device else _ops(timed, nests)), names, on_device)


@contextlib.contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Inside the block every call of a module of ``model`` is a `record_function` range with the module's
    qualified name.

    Forward hooks, removed at the end; the root goes by the name of its class. Compiled code is left alone: a
    module that is compiled inside the block has no range.
    """
    open_ranges: list[torch.profiler.record_function] = []
    handles = []

    def hook(name: str, module: nn.Module) -> None:
        def enter(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                open_ranges.append(torch.profiler.record_function(MODULE_PREFIX + name))
                open_ranges[-1].__enter__()

        def leave(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                open_ranges.pop().__exit__(None, None, None)

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))  # also if the module raises

    for name, module in model.named_modules():
        hook(name or type(model).__name__, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Nest:
    """Nested ranges of one thread, to ask which are open at a time."""

    def __init__(self, ranges: Sequence[dict[str, Any]]) -> None:
        self._starts = [r["ts"] for r in ranges]
        self._ends = [r["ts"] + r["dur"] for r in ranges]
        self._parents: list[int] = []
        self._paths: list[tuple[str, ...]] = []
        for index, event in enumerate(ranges):
            parent = self._open_at(index - 1, event["ts"])
            self._parents.append(parent)
            self._paths.append(((*self._paths[parent],) if parent >= 0 else ()) + (event["name"],))

    def _open_at(self, index: int, time: float) -> int:
        while index >= 0 and self._ends[index] < time:
            index = self._parents[index]
        return index

    def path(self, time: float) -> tuple[str, ...]:
        index = self._open_at(bisect.bisect_right(self._starts, time) - 1, time)
        return self._paths[index] if index >= 0 else ()


def _path(nests: dict[Any, _Nest], event: dict[str, Any]) -> tuple[str, ...]:
    nest = nests.get(event["tid"]) or (next(iter(nests.values())) if len(nests) == 1 else None)
    return nest.path(event["ts"]) if nest is not None else ()


def _kernels(timed: Sequence[dict[str, Any]], nests: dict[Any, _Nest]) -> Iterator[Activity]:
    launches = {
        e["args"]["correlation"]: e
        for e in timed
        if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})
    }
    for event in timed:
        if event.get("cat") not in _ON_DEVICE:
            continue
        correlation = event.get("args", {}).get("correlation")
        launch = launches.get(correlation)
        if launch is None:
            yield Activity(event["name"], event["dur"], recorded=False)
        else:
            yield Activity(
                event["name"],
                event["dur"],
                _path(nests, launch),
                correlation if "GraphLaunch" in launch["name"] else None,
            )


def _ops(timed: Sequence[dict[str, Any]], nests: dict[Any, _Nest]) -> Iterator[Activity]:
    ends: dict[Any, float] = {}  # by thread: end of the outermost op so far
    for event in timed:
        if (
            event.get("cat") != "cpu_op"
            or "::" not in event["name"]
            or event["name"].startswith("profiler::")
        ):
            continue
        if event["ts"] >= ends.get(event["tid"], float("-inf")):
            ends[event["tid"]] = event["ts"] + event["dur"]
            yield Activity(event["name"], event["dur"], _path(nests, event))
