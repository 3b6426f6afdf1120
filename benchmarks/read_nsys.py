"""What a report of Nsight Systems says of one range, as a document for benchmarks/results.

    nsys export --type sqlite decode.nsys-rep
    python benchmarks/read_nsys.py decode.sqlite --range generation --report kernels.json \\
        --conditions about.json --output h200_nsys.json

The range: "measured" of examples/profile_nsys.py, "generation" of ``torchpaged generate``. ``--report`` is
`KernelReport.to_dict()` of the same step, from a process without nsys; its kernels stand beside those that
nsys has of each replay in the range.
"""

import argparse
import itertools
import json
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Any

PUSH_POP = 59  # NVTX_EVENTS.eventType
RANGES = f"""SELECT coalesce(e.text, s.value), e.start, e.end FROM NVTX_EVENTS e
    LEFT JOIN StringIds s ON e.textId = s.id WHERE e.eventType = {PUSH_POP} ORDER BY e.start"""
LAUNCHES = """SELECT r.correlationId, r.start, r.end FROM CUPTI_ACTIVITY_KIND_RUNTIME r
    JOIN StringIds s ON r.nameId = s.id WHERE s.value LIKE '%GraphLaunch%' ORDER BY r.start"""
KERNELS = """SELECT correlationId, start, end, demangledName, graphNodeId FROM CUPTI_ACTIVITY_KIND_KERNEL
    ORDER BY start"""
SHOWN = 3  # steps in the timeline
NS = 1000.0


def joined(kernels: list[tuple[int, int]], gap: int = 1000) -> list[list[int]]:
    """Intervals in which the GPU rests for at most ``gap`` ns at a time."""
    found: list[list[int]] = []
    for start, end in kernels:
        if found and start - found[-1][1] <= gap:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return found


def read(path: Path, within: str = "measured") -> dict[str, Any]:
    """Ranges, replays and a timeline of some steps in the range of that name."""
    data = sqlite3.connect(path)
    ranges = data.execute(RANGES).fetchall()
    first, last = next((start, end) for name, start, end in ranges if name == within)
    kernels = defaultdict(list)
    for correlation, start, end, name, node in data.execute(KERNELS):
        kernels[correlation].append((start, end, name, node))
    launches = [row for row in data.execute(LAUNCHES) if first <= row[1] < last]
    counts = Counter(len(kernels[row[0]]) for row in launches)
    usual = counts.most_common(1)[0][0]
    replays = [(row, kernels[row[0]]) for row in launches if len(kernels[row[0]]) == usual]
    ends = [(run[0][0], max(kernel[1] for kernel in run)) for _, run in replays]
    times: dict[str, list[int]] = defaultdict(list)
    for name, start, end in ranges:
        if first <= start < last and not name.startswith("cub::"):
            times[name].append(end - start)
    steps = [(start, end) for name, start, end in ranges if name == "step" and first <= start < last]
    begin, until = steps[len(steps) // 2][0], steps[len(steps) // 2 + SHOWN - 1][1]
    every = sorted(kernel[:2] for run in kernels.values() for kernel in run)

    def us(time: int) -> float:
        return round((time - begin) / NS, 1)

    return {
        "kernels": sum(len(run) for run in kernels.values()),
        "without_name": sum(kernel[2] == 0 for run in kernels.values() for kernel in run),
        "ranges": [
            {"name": name, "count": len(all_of), "median_us": round(median(all_of) / NS, 1)}
            for name, all_of in sorted(times.items(), key=lambda item: -sum(item[1]))
        ],
        "replays": {
            "count": len(replays),
            "kernels_each": usual,
            "nodes_each": len({kernel[3] for kernel in replays[0][1]}),
            "kernels_us": round(median(sum(k[1] - k[0] for k in run) for _, run in replays) / NS, 1),
            "span_us": round(median(end - start for start, end in ends) / NS, 1),
            "between_us": round(median(b[0] - a[1] for a, b in itertools.pairwise(ends)) / NS, 1),
            "launch_us": round(median(row[2] - row[1] for row, _ in replays) / NS, 1),
        },
        "timeline": {
            "host": [[name, us(s), us(e)] for name, s, e in ranges if begin <= s < until],
            "gpu": [[us(s), us(e)] for s, e in joined([k for k in every if k[1] > begin and k[0] < until])],
        },
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("sqlite", type=Path)
    parser.add_argument("--range", default="measured")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--conditions", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    report = json.loads(given.report.read_text())
    document = {
        "benchmark": "nsys",
        "conditions": json.loads(given.conditions.read_text()),
        **read(given.sqlite, given.range),
        "kernel_report": {
            "count": report["count"] / report.get("steps", 1),
            "total_us": round(report["total_us"] / report.get("steps", 1), 1),
        },
    }
    given.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
