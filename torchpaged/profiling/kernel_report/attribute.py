"""From profiled runs to reports: one step, its replay as a graph, or a whole generation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.profiling.kernel_report.data import (
    COMPILED,
    Between,
    KernelTime,
    ModuleKernels,
    UnmatchedKernels,
)
from torchpaged.profiling.kernel_report.match import match_kernels
from torchpaged.profiling.kernel_report.report import KernelReport
from torchpaged.profiling.kernel_report.trace import Activity, Trace, module_ranges, profiled

#: The eager run's activities for a graph launch, given the ranges around that launch.
Reference = Callable[[tuple[str, ...]], Sequence[Activity]]


def kernels_per_layer(
    step: Callable[[], Any],
    model: nn.Module,
    replay: Callable[[], Any] | None = None,
    *,
    warmup_iters: int = 1,
) -> KernelReport:
    """Count and time the kernels of one step, module by module.

    Args:
        step: the step, run eagerly: modules inside compiled code are not seen. Under inference mode if the
            replay's capture was.
        model: whose modules, under the names of ``named_modules()``.
        replay: the same step as a captured graph; counts and times are then the replay's.
        warmup_iters: calls of each before the one that counts.

    Raises:
        ArgumentError: ``step`` ran nothing that the profiler saw.
    """
    eager = _run(step, model, warmup_iters)
    if replay is None:
        return _report(eager.activities, _kind(eager))
    # with the ranges: an eager capture runs the modules again, and needs no matching
    again = _run(replay, model, warmup_iters)
    without_modules = all(activity.module is None for activity in again.activities)
    return _report(again.activities, _kind(again), 1, lambda _: eager.activities, one_launch=without_modules)


def kernels_of_generation(
    trace: Trace,
    model: nn.Module,
    launch_eager: Callable[[int], Any] | None = None,
    prefill_eager: Callable[[int], Any] | None = None,
) -> dict[str, KernelReport]:
    """Kernels of a traced generation, by what the engine was doing: "prefill", "decode", "other"; captures
    are left out.

    Args:
        trace: of a run of `torchpaged.engine.Generator` with the engine's ranges
            (`torchpaged.profiling.recorded`) and `module_ranges`.
        model: whose modules.
        launch_eager: runs a decode step of so many rows without a graph, to match the replays of that
            bucket with.
        prefill_eager: the same for prefills of so many tokens.
    """
    launches = {"replay": launch_eager, "prefill": prefill_eager}
    eager: dict[tuple[str, int], Sequence[Activity]] = {}

    def reference(ranges: tuple[str, ...]) -> Sequence[Activity]:
        found = re.search(
            r"^(replay|prefill) batch=\d+ (?:tokens=\d+ )?padded=(\d+)$", "\n".join(ranges), re.MULTILINE
        )
        launch = launches[found[1]] if found else None
        if found is None or launch is None:
            return ()
        key, rows = (found[1], int(found[2])), int(found[2])
        if key not in eager:
            eager[key] = _run(lambda: launch(rows), model, 1).activities
        return eager[key]

    phases: dict[str, list[Activity]] = {}
    for activity in trace.activities:
        phase = _phase(activity.ranges)
        if phase is not None:
            phases.setdefault(phase, []).append(activity)
    first_words = [name.split(" ", 1)[0] for name in trace.ranges]
    steps = {
        "prefill": first_words.count("prefill"),
        "decode": first_words.count("replay") or first_words.count("decode"),
    }
    return {
        phase: _report(phases[phase], _kind(trace), steps.get(phase) or 1, reference)
        for phase in ("prefill", "decode", "other")
        if phase in phases
    }


def _phase(ranges: tuple[str, ...]) -> str | None:
    words = {name.split(" ", 1)[0] for name in ranges}
    if "capture" in words:
        return None
    return next((phase for phase in ("prefill", "decode") if phase in words), "other")


def _run(step: Callable[[], Any], model: nn.Module, warmup_iters: int) -> Trace:
    for _ in range(warmup_iters):
        step()
    with module_ranges(model):
        trace = profiled(step)
    if not trace.activities:
        raise ArgumentError("step", "a call that runs kernels", "none seen by the profiler")
    return trace


def _kind(trace: Trace) -> str:
    return "kernel" if trace.on_device else "op"


def _report(
    activities: Iterable[Activity],
    kind: str,
    steps: int = 1,
    reference: Reference | None = None,
    one_launch: bool = False,
) -> KernelReport:
    """Activities by module; those of one graph launch are matched together. ``one_launch``: all are of
    one launch."""
    totals = _Totals(KernelReport(kind, steps))
    launches: dict[int | None, list[Activity]] = {}
    for activity in activities:
        if one_launch or activity.graph is not None:
            launches.setdefault(None if one_launch else activity.graph, []).append(activity)
        elif activity.is_compiled:
            totals.add_unmatched(activity, Between(COMPILED, activity.module))
        elif activity.recorded:
            totals.add(activity, activity.module)
        else:
            totals.add_unmatched(activity, Between("", ""))
    known: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[Sequence[int | None], Sequence[Activity]]] = {}
    for launch in launches.values():
        names, ranges = tuple(activity.name for activity in launch), launch[0].ranges
        if (ranges, names) not in known:
            eager = reference(ranges) if reference is not None else ()
            known[ranges, names] = match_kernels([activity.name for activity in eager], names), eager
            totals.add_missing(*known[ranges, names])
        totals.add_launch(launch, *known[ranges, names])
    return totals.report


class _Totals:
    """Fills a report."""

    def __init__(self, report: KernelReport) -> None:
        self.report = report
        self._rows: dict[tuple[int, Any], Any] = {}
        self._kernels: dict[tuple[int, Any, str], KernelTime] = {}

    def add(self, activity: Activity, module: str | None) -> None:
        self._count(self.report.modules, ModuleKernels, module, activity)

    def add_unmatched(self, activity: Activity, between: Between) -> None:
        self._count(self.report.unmatched, UnmatchedKernels, between, activity)

    def add_launch(
        self, launch: Sequence[Activity], partners: Sequence[int | None], eager: Sequence[Activity]
    ) -> None:
        modules = ["" if partner is None else eager[partner].module for partner in partners]
        before = [""] * len(launch)  # module of the next matched kernel
        following: Any = ""
        for index in reversed(range(len(launch))):
            before[index] = following
            following = following if partners[index] is None else modules[index]
        after: str | None = ""
        for index, activity in enumerate(launch):
            if partners[index] is None:
                self.add_unmatched(activity, Between(after, before[index]))
            else:
                after = modules[index]
                self.add(activity, after)

    def add_missing(self, partners: Sequence[int | None], eager: Sequence[Activity]) -> None:
        found = set(partners)
        for index, activity in enumerate(eager):
            if index not in found:
                self._count(self.report.missing, ModuleKernels, activity.module, activity)

    def _count(self, rows: list[Any], kind: type, key: Any, activity: Activity) -> None:
        if (id(rows), key) not in self._rows:
            self._rows[id(rows), key] = kind(key)
            rows.append(self._rows[id(rows), key])
        place = (id(rows), key, activity.name)
        if place not in self._kernels:
            self._kernels[place] = KernelTime(activity.name)
            self._rows[id(rows), key].kernels.append(self._kernels[place])
        self._kernels[place].count += 1
        self._kernels[place].total_us += activity.us
