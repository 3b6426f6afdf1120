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
        with torch.profiler.profile(acc_events=True) as profiler:
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
    # of each thread, the ranges that are open; what another thread launches is inside those of the only one
    stacks: dict[Any, list[dict[str, Any]]] = {e["tid"]: [] for e in timed if _is_range(e)}
    alone = next(iter(stacks.values())) if len(stacks) == 1 else []
    launches: dict[Any, tuple[str, tuple[str, ...]]] = {}  # by correlation: the call, and its ranges
    ops: list[Activity] = []
    ends: dict[Any, float] = {}  # by thread: end of the outermost op so far
    for event in timed:
        name, thread, stack = event["name"], event["tid"], stacks.get(event["tid"], alone)
        while stack and stack[-1]["ts"] + stack[-1]["dur"] < event["ts"]:
            stack.pop()
        if _is_range(event):
            stack.append(event)
        elif event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = name, tuple(r["name"] for r in stack)
        elif _is_op(event) and event["ts"] >= ends.get(thread, float("-inf")):
            ends[thread] = event["ts"] + event["dur"]
            ops.append(Activity(name, event["dur"], tuple(r["name"] for r in stack)))
    kernels = [_kernel(event, launches) for event in timed if event.get("cat") in _ON_DEVICE]
    names = tuple(e["name"] for e in timed if e.get("cat") == "user_annotation")
    return Trace(tuple(kernels or ops), names, bool(kernels))


def _is_range(event: dict[str, Any]) -> bool:
    compiled = event.get("cat") == "cpu_op" and event["name"].startswith(_COMPILED_PREFIX)
    return compiled or event.get("cat") == "user_annotation"


def _is_op(event: dict[str, Any]) -> bool:
    name = event["name"]
    return event.get("cat") == "cpu_op" and "::" in name and not name.startswith("profiler::")


def _kernel(event: dict[str, Any], launches: dict[Any, tuple[str, tuple[str, ...]]]) -> Activity:
    correlation = event.get("args", {}).get("correlation")
    if correlation not in launches:
        return Activity(event["name"], event["dur"], recorded=False)
    call, ranges = launches[correlation]
    return Activity(event["name"], event["dur"], ranges, correlation if "GraphLaunch" in call else None)


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
