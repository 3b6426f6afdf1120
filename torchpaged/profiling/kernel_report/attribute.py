"""From profiled runs to reports: one step, its replay as a graph, or a whole generation."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.profiling.kernel_report.report import COMPILED, Between, KernelReport, Place, Rows, Runs
from torchpaged.profiling.kernel_report.trace import Activity, Trace, module_ranges, profiled
from torchpaged.profiling.ranges import ProfilingUnavailableError


def match_kernels(eager: Sequence[str], replay: Sequence[str]) -> list[int | None]:
    """For each kernel of ``replay``, its index in ``eager``, or None if that can't be told.

    A kernel in a replayed graph carries its name and nothing of where it came from. Pairs are therefore made
    by order and name, and only where both runs leave no choice: a name that occurs as often here as there
    pairs first with first, second with second, as long as no pair crosses another; between neighbouring pairs
    the same is asked again of what lies between. Everything else stays open. That a replay dropped a kernel
    and gained another of the same name at another place can't be seen from names.

    Args:
        eager: names of the kernels of the eager run, in order.
        replay: those of the replay.
    """
    partners: list[int | None] = [None] * len(replay)
    gaps = [(0, len(eager), 0, len(replay))]
    while gaps:
        start, end, first, last = gaps.pop()
        pairs = _certain(eager[start:end], replay[first:last])
        for here, there in pairs:
            partners[first + there] = start + here
        if pairs:
            before = [(-1, -1), *pairs]
            after = [*pairs, (end - start, last - first)]
            gaps += [
                (start + a + 1, start + b, first + x + 1, first + y)
                for (a, x), (b, y) in zip(before, after, strict=True)
                if b > a + 1 and y > x + 1
            ]
    return partners


def _certain(eager: Sequence[str], replay: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of names that occur equally often, without those that cross, in order."""
    places: dict[str, tuple[list[int], list[int]]] = {}
    for side, names in enumerate((eager, replay)):
        for index, name in enumerate(names):
            places.setdefault(name, ([], []))[side].append(index)
    equal = {name: sides for name, sides in places.items() if len(sides[0]) == len(sides[1])}
    pairs = sorted(
        ((b, a, name) for name, (here, there) in equal.items() for a, b in zip(here, there, strict=True))
    )
    crossing: set[str] = set()
    highest = -1
    for _, a, name in pairs:
        crossing |= {name} if a < highest else set()
        highest = max(highest, a)
    lowest = len(eager)
    for _, a, name in reversed(pairs):
        crossing |= {name} if a > lowest else set()
        lowest = min(lowest, a)
    return [(a, b) for b, a, name in pairs if name not in crossing]


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
    prefill_eager: Callable[[int, int], Any] | None = None,
) -> dict[str, KernelReport]:
    """Kernels of a traced generation, by what the engine was doing: "prefill", "decode", "other"; captures
    are left out.

    Args:
        trace: of a run of `torchpaged.engine.Generator` with the engine's ranges
            (`torchpaged.profiling.recorded`) and `module_ranges`.
        model: whose modules.
        launch_eager: runs a decode step of so many rows without a graph, to match the replays of that
            bucket with.
        prefill_eager: the same for prefills of so many requests, 1 or several, and tokens.

    Raises:
        ProfilingUnavailableError: as `kernels_per_layer`.
    """
    _check_recorded(trace, model)
    launches: dict[str, Callable[[int, int], Any]] = {}
    if launch_eager is not None:
        launches["replay"] = lambda num_reqs, rows: launch_eager(rows)
    if prefill_eager is not None:
        launches["prefill"] = prefill_eager
    eager: dict[tuple[str, int, int], Sequence[Activity]] = {}

    def reference(ranges: tuple[str, ...]) -> Sequence[Activity]:
        pattern = r"^(replay|prefill) batch=(\d+) (?:\w+=\d+ )*padded=(\d+)$"
        found = re.search(pattern, "\n".join(ranges), re.MULTILINE)
        if found is None or found[1] not in launches:
            return ()
        kind, size = found[1], int(found[3])
        # A prefill of one request may have kernels of its own.
        key = kind, 1 if kind == "prefill" and int(found[2]) == 1 else 2, size
        if key not in eager:
            eager[key] = _run(partial(launches[kind], *key[1:]), model, 1).activities
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
