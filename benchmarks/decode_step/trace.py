"""What the GPU did, kernel by kernel, through torch.profiler: counts per step, time per kernel name,
idle shares.

    trace = record(lambda: runner.replay(8), device)
    kernels_per_step(trace, num_layers=16, steps=1); idle(trace)

The profiler itself adds to the gaps between kernels: idle shares are upper bounds. Empty on a CPU.

Afterwards, too: CUPTI stays attached to the process, and launching a graph then costs the host 0.2 us per
kernel instead of 2 us in all. `has_recorded` tells; TEARDOWN_CUPTI=1 in the environment detaches it after
each trace.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


class Activity(NamedTuple):
    """One kernel, copy or memset: start and end in microseconds, name, and the launch it came from (a graph's
    nodes share one)."""

    start: float
    end: float
    name: str
    launch: int


_recorded = False


def has_recorded() -> bool:
    """Whether `record` has traced a GPU in this process, so that host times of launches are no longer those
    of a program without a profiler."""
    return _recorded


def record(call: Callable[[], Any], device: torch.device) -> list[Activity]:
    """Everything the GPU did for ``call``, in order of start."""
    if device.type != "cuda":
        return []
    global _recorded
    _recorded = True
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    # the trace file holds the launch of each kernel; the public event list does not
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return parse(events)


def parse(events: Sequence[dict[str, Any]]) -> list[Activity]:
    """Activities of a Chrome trace's ``traceEvents``."""
    found = [
        Activity(e["ts"], e["ts"] + e["dur"], e["name"], int(e.get("args", {}).get("correlation", -1)))
        for e in events
        if e.get("cat") in _ON_DEVICE
    ]
    return sorted(found)


def kernels_per_step(trace: Sequence[Activity], num_layers: int, steps: int) -> dict[str, Any]:
    """Counts, and time by kernel name.

    A name that occurs ``m * num_layers + rest`` times in a step counts ``m`` times per layer. Returns
    ``kernels_per_step``, ``kernels_per_layer`` and ``kernels``: ``{name, per_step, us_per_step}``, the
    longest first.
    """
    if not trace:
        return {}
    times: dict[str, list[float]] = {}
    for activity in trace:
        times.setdefault(activity.name, []).append(activity.end - activity.start)
    kernels = [
        {"name": name[:120], "per_step": len(t) / steps, "us_per_step": sum(t) / steps}
        for name, t in times.items()
    ]
    return {
        "kernels_per_step": len(trace) / steps,
        "kernels_per_layer": sum(len(t) // steps // num_layers for t in times.values()),
        "kernels": sorted(kernels, key=lambda kernel: -float(kernel["us_per_step"])),
    }


def idle(trace: Sequence[Activity]) -> dict[str, float]:
    """Shares of the time from the first large launch to the end of the last one.

    Large: at least half as many activities as the largest. What goes before, such as the writing of the
    requests, is no part of a step.

    Returns:
        ``idle_between_launches``: after everything of one launch had ended and before anything of the
            next began;
        ``idle_between_kernels``: no kernel ran, those gaps included. Empty without activities.
    """
    if not trace:
        return {}
    sizes = Counter(activity.launch for activity in trace)
    large = [
        index for index, activity in enumerate(trace) if 2 * sizes[activity.launch] >= max(sizes.values())
    ]
    trace = trace[large[0] : large[-1] + 1]
    covered, launch = trace[0].start, trace[0].launch
    gaps = between_launches = 0.0
    for activity in trace:
        if activity.start > covered:
            gaps += activity.start - covered
            between_launches += activity.start - covered if activity.launch != launch else 0.0
        covered, launch = max(covered, activity.end), activity.launch
    elapsed = covered - trace[0].start
    return {
        "idle_between_launches": between_launches / elapsed,
        "idle_between_kernels": gaps / elapsed,
        "traced_ms": elapsed / 1e3,
    }
