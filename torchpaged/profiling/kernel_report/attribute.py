"""From profiled runs to reports: one step, its replay as a graph, or a whole generation."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.profiling.kernel_report.match import match_kernels
from torchpaged.profiling.kernel_report.report import COMPILED, Between, KernelReport, Place, Rows, Runs
from torchpaged.profiling.kernel_report.trace import Activity, Trace, module_ranges, profiled
from torchpaged.profiling.ranges import ProfilingUnavailableError

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
        ProfilingUnavailableError: the model is on a GPU and no kernel of it was recorded, as under Nsight
            Systems.
    """
    eager = _run(step, model, warmup_iters)
    if replay is None:
        return _report(eager, eager.activities)
    # with the ranges: an eager capture runs the modules again, and needs no matching
    again = _run(replay, model, warmup_iters)
    without_modules = all(activity.module is None for activity in again.activities)
    return _report(again, again.activities, 1, lambda _: eager.activities, one_launch=without_modules)


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

    Raises:
        ProfilingUnavailableError: as `kernels_per_layer`.
    """
    _check_recorded(trace, model)
    launches = {"replay": launch_eager, "prefill": prefill_eager}
    eager: dict[tuple[str, int], Sequence[Activity]] = {}

    def reference(ranges: tuple[str, ...]) -> Sequence[Activity]:
        found = re.search(r"^(replay|prefill) (?:\w+=\d+ )+padded=(\d+)$", "\n".join(ranges), re.MULTILINE)
        launch = launches[found[1]] if found else None
        if found is None or launch is None:
            return ()
        key, rows = (found[1], int(found[2])), int(found[2])
        if key not in eager:
            eager[key] = _run(lambda: launch(rows), model, 1).activities
        return eager[key]

    phases: dict[str, list[Activity]] = {}
    for activity in trace.activities:
        words = {name.split(" ", 1)[0] for name in activity.ranges}
        if "capture" not in words:
            phase = next((phase for phase in ("prefill", "decode") if phase in words), "other")
            phases.setdefault(phase, []).append(activity)
    first_words = [name.split(" ", 1)[0] for name in trace.ranges]
    steps = {
        "prefill": first_words.count("prefill"),
        "decode": first_words.count("replay") or first_words.count("decode"),
    }
    return {
        phase: _report(trace, phases[phase], steps.get(phase) or 1, reference)
        for phase in ("prefill", "decode", "other")
        if phase in phases
    }


def _run(step: Callable[[], Any], model: nn.Module, warmup_iters: int) -> Trace:
    for _ in range(warmup_iters):
        step()
    with module_ranges(model):
        trace = profiled(step)
    if not trace.activities:
        raise ArgumentError("step", "a call that runs kernels", "none seen by the profiler")
    _check_recorded(trace, model)
    return trace


def _check_recorded(trace: Trace, model: nn.Module) -> None:
    """Refuse to tell of a GPU's model by ops of the host."""
    if not trace.on_device and any(parameter.is_cuda for parameter in model.parameters()):
        raise ProfilingUnavailableError(
            "torch.profiler recorded no kernel of a model on a GPU; another profiler, such as Nsight "
            "Systems, takes its records: run the report in a process without it"
        )


def _report(
    trace: Trace,
    activities: Iterable[Activity],
    steps: int = 1,
    reference: Reference = lambda ranges: (),
    one_launch: bool = False,
) -> KernelReport:
    """Activities of the trace by module; those of one graph launch are matched together. ``one_launch``: all
    are of one launch."""
    report = KernelReport("kernel" if trace.on_device else "op", steps)
    launches: dict[int | None, list[Activity]] = {}
    for activity in activities:
        if one_launch or activity.graph is not None:
            launches.setdefault(None if one_launch else activity.graph, []).append(activity)
        elif activity.is_compiled:
            _count(report.rows, Between(COMPILED, activity.module), activity)
        else:
            _count(report.rows, activity.module if activity.recorded else Between("", ""), activity)
    known: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Place]] = {}
    for launch in launches.values():
        names, ranges = tuple(activity.name for activity in launch), launch[0].ranges
        if (ranges, names) not in known:
            eager = reference(ranges)
            partners = match_kernels([activity.name for activity in eager], names)
            known[ranges, names] = _places(partners, eager)
            for index in sorted({*range(len(eager))} - {*partners}):
                _count(report.missing, eager[index].module, eager[index])
        for place, activity in zip(known[ranges, names], launch, strict=True):
            _count(report.rows, place, activity)
    return report


def _places(partners: Sequence[int | None], eager: Sequence[Activity]) -> list[Place]:
    """Of each kernel of a launch: its partner's module, or those of the matched kernels around it."""
    places: list[Place] = [None if at is None else eager[at].module for at in partners]
    before: list[str | None] = [""]  # module of the next matched kernel, from the last one on
    for at in reversed(partners):
        before.append(before[-1] if at is None else eager[at].module)
    after: str | None = ""
    for index, at in enumerate(partners):
        if at is None:
            places[index] = Between(after, before[len(partners) - index])
        else:
            after = eager[at].module
    return places


def _count(rows: Rows, place: Place, activity: Activity) -> None:
    rows.at(place).add({activity.name: Runs(1, activity.us)})
