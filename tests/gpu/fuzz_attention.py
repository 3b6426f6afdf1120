"""Random attention configurations on a GPU, each in a process with a watchdog; what ran, and what failed,
as JSON.

    python tests/gpu/fuzz_attention.py --configurations 320 --batches 30 --workers 14 --seconds 500 \\
        --first-seed 0 --json fuzz.json

Ends by itself after ``--seconds``; the next run goes on with ``--first-seed`` at ``next_seed`` of this one's
JSON. A failure is repeated with ``--first-seed SEED --configurations 1``. The exit status is 1 if anything
failed, hung or crashed, or if nothing ran.
"""

import argparse
import json
import platform
import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from fuzz.aims import AIMS
from worker_pool import Outcome, WorkerPool

from torchpaged.cli.report import versions


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--configurations", type=int, default=320)
    p.add_argument("--batches", type=int, default=30, help="per configuration")
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--seconds", type=float, help="until running cases are cut; no limit by default")
    p.add_argument("--reserve", type=float, default=30.0, help="seconds before that end: no case is begun")
    p.add_argument("--first-seed", type=int, default=0)
    p.add_argument("--backends", nargs="+", default=["cuda", "triton"])
    aims = ["", *AIMS]
    p.add_argument("--aim", choices=aims, default="", help="draw for one kernel of cuda, not --backends")
    p.add_argument("--device", default="cuda")
    p.add_argument("--small", action="store_true", help="lengths and heads for a CPU")
    p.add_argument("--no-captures", action="store_true", help="no CUDA graphs")
    p.add_argument("--compile-limit", type=float, default=180.0, help="seconds of a launch on the host")
    p.add_argument("--run-limit", type=float, default=60.0, help="seconds of the device's part")
    p.add_argument("--json", type=Path, default=None)
    p.add_argument("--target", default="fuzz.case:run_case", help="what a worker runs")
    return p


def _end_of(outcome: Outcome) -> dict[str, Any]:
    """Which case, and where it was."""
    batch, seconds = outcome.facts.get("batch"), round(outcome.seconds, 1)
    return {"seed": outcome.case["seed"], "batch": batch, "phase": outcome.phase, "seconds_in_phase": seconds}


def summary(arguments: argparse.Namespace, outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """Counts, failures with their seeds and configurations, and where it ran."""
    done = [outcome.result for outcome in outcomes if outcome.result is not None]
    failures: list[dict[str, Any]] = []
    for outcome in outcomes:
        base = {"seed": outcome.case["seed"], "configuration": outcome.facts.get("configuration")}
        if outcome.kind in ("hang", "crash", "error"):
            failures.append(base | _end_of(outcome) | {"kind": outcome.kind, "message": outcome.message})
        wrong = (outcome.result or {}).get("failures", ())
        failures += [{**base, "kind": "wrong", **failure} for failure in wrong]
    seeds, kinds = [o.case["seed"] for o in outcomes], Counter(outcome.kind for outcome in outcomes)
    begun = sum(o.facts.get("batch", 0) for o in outcomes if o.result is None)
    times = ("launching_seconds", "running_seconds", "seconds")
    launching, running, in_all = (round(sum(r[name] for r in done), 1) for name in times)
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "gpu": _gpu(arguments.device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **versions(("triton", "cuda-bindings", "numpy")),
        },
        "first_seed": arguments.first_seed,
        "next_seed": max(seeds, default=arguments.first_seed - 1) + 1,
        "configurations": len(done),
        "batches": sum(r["batches"] for r in done) + begun,
        "hangs": kinds["hang"],
        "crashes": kinds["crash"],
        "failures": failures,
        "cut": [_end_of(outcome) for outcome in outcomes if outcome.kind == "cut"],
        "kernels": dict(Counter(r["kernel"] for r in done)),
        "captured_configurations": sum(r["captured"] for r in done),
        "compiles": sum(r["compiles"] for r in done),
        "launching_seconds": launching,
        "running_seconds": running,
        "worker_seconds": in_all,
        "seconds": round(seconds, 1),
        "workers": arguments.workers,
        "seeds": sorted(outcome.case["seed"] for outcome in outcomes if outcome.result is not None),
    }


def _gpu(device: str) -> str | None:
    if not device.startswith("cuda"):
        return None
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return f"{name}, compute capability {major}.{minor}"


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    shared = {
        "batches": arguments.batches,
        "backends": arguments.backends,
        "device": arguments.device,
        "small": arguments.small,
        "captures": not arguments.no_captures,
        "aim": arguments.aim,
    }
    cases = ({"seed": arguments.first_seed + i, **shared} for i in range(arguments.configurations))
    limits = {"launching": arguments.compile_limit, "running": arguments.run_limit}
    begin, outcomes = time.monotonic(), []
    with WorkerPool(
        arguments.target, workers=arguments.workers, limits=limits, environment={"OMP_NUM_THREADS": "1"}
    ) as pool:
        for outcome in pool.run(cases, seconds=arguments.seconds, reserve=arguments.reserve):
            outcomes.append(outcome)
            wrong = (outcome.result or {}).get("failures", ())
            what = f"batch {outcome.facts.get('batch')}, {outcome.seconds:.0f} s {outcome.phase}"
            kind, what = ("wrong", wrong[0]["message"]) if wrong else (outcome.kind, what)
            if kind != "done":
                print(f"seed {outcome.case['seed']}: {kind}: {what[:300]}", flush=True)
            elif len(outcomes) % 20 == 0:
                print(f"{len(outcomes)} configurations, {time.monotonic() - begin:.0f} s", flush=True)
            if arguments.json is not None:  # after each: what ran is known whatever happens to this process
                report = summary(arguments, outcomes, time.monotonic() - begin)
                arguments.json.write_text(json.dumps(report, indent=1))
    report = summary(arguments, outcomes, time.monotonic() - begin)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1))
    print(json.dumps({k: v for k, v in report.items() if k not in ("failures", "cut", "seeds")}))
    print(f"{len(report['failures'])} failures, {len(report['cut'])} cut")
    return 1 if report["failures"] or not report["batches"] else 0


if __name__ == "__main__":
    sys.exit(main())
