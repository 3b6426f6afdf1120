"""The parts in processes of their own, under a watchdog, and their results."""

import json
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from prefill_kernel.cases import CHECKS, GRAPH, POWER, TIMES
from prefill_kernel.parts import PARTS
from torchpaged.custom_ops.cuda import jit
from torchpaged.custom_ops.cuda.config import Config

SILENCE_S = 40.0
SCRIPT = Path(__file__).resolve().parent.parent / "bench_prefill_kernel.py"


def work(part: str, cases: list[str]) -> None:
    """Some cases of a part, in this process."""
    for name in cases:
        print(json.dumps({"begin": name}), flush=True)
        try:
            result = PARTS[part][name]()
        except Exception as problem:
            result = {"ok": False, "raised": f"{type(problem).__name__}: {problem}"[:400]}
        print(json.dumps({"part": part, "case": name, **result}), flush=True)
        if "raised" in result and ("CUDA error" in result["raised"] or "cuLaunch" in result["raised"]):
            raise SystemExit(3)  # the context is lost


def specialisations() -> dict[tuple[str, str], list[Config]]:
    """Part and case -> the constants of what it launches."""
    needed = {("check", name): [case.config()] for name, case in CHECKS.items()}
    needed["check", "graph"] = [GRAPH.config()]
    needed |= {("time", name): [case.config()] for name, case in TIMES.items()}
    needed |= {("power", name): [case.config()] for name, case in POWER.items()}
    return needed


def compile_ahead(parts: list[str]) -> dict[tuple[str, str], str]:
    """Specialisations into the cache on disk, side by side: a case's 40 seconds are not for compilers. Part
    and case -> why it can't run."""
    needed = {key: values for key, values in specialisations().items() if key[0] in parts}
    distinct = list(dict.fromkeys(config for values in needed.values() for config in values))
    begin = time.monotonic()
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), multiprocessing.get_context("fork")) as pool:
        errors = dict(zip(distinct, pool.map(compile_one, distinct), strict=True))
    print(f"{len(distinct)} specialisations compiled in {time.monotonic() - begin:.1f} s", flush=True)
    found = {
        key: next((error for config in values if (error := errors[config])), "")
        for key, values in needed.items()
    }
    return {key: error for key, error in found.items() if error}


def compile_one(config: Config) -> str:
    """The compiler's first complaint, or nothing."""
    try:
        jit.machine_code("prefill.cu", config, (9, 0))
    except Exception as problem:
        lines = str(problem).splitlines() or [type(problem).__name__]
        return next((line for line in lines if "error" in line), lines[0])[:300]
    return ""


class Report:
    """Results as they come: a line each, and one document that is whole after every case."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.results = path, list[dict[str, Any]]()

    def add(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        print(json.dumps(result), flush=True)
        if self.path:
            document = {
                "gpu": torch.cuda.get_device_name(0),
                "torch": torch.__version__,
                "results": self.results,
            }
            self.path.write_text(json.dumps(document, indent=1) + "\n")


def supervise(part: str, names: list[str], stop: float, report: Report) -> None:
    """Cases of a part in other processes, one after the other, each until it hangs or fails."""
    while names and time.monotonic() < stop:
        command = [sys.executable, str(SCRIPT), "--work", part, "--cases", json.dumps(names)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        assert process.stdout and process.stderr
        errors: list[str] = []
        threading.Thread(
            target=lambda p=process, q=lines: [*map(q.put, p.stdout), q.put(None)], daemon=True
        ).start()  # type: ignore[misc]
        reader = threading.Thread(target=lambda p=process, e=errors: e.append(p.stderr.read()), daemon=True)  # type: ignore[misc]
        reader.start()
        before = len(names)
        while names:
            try:
                line = lines.get(timeout=max(0.1, min(SILENCE_S, stop - time.monotonic())))
            except queue.Empty:
                late = time.monotonic() >= stop
                report.add(
                    {
                        "part": part,
                        "case": names.pop(0),
                        "ok": False,
                        **({"time is up": True} if late else {"hung": True}),
                    }
                )
                break
            if line is None:
                break
            told = json.loads(line) if line.startswith("{") else {}
            if "case" in told:
                report.add(told)
                names = names[1:]
        process.kill()
        process.wait()
        reader.join(5)
        if len(names) == before:  # it ended in the middle of a case
            report.add({"part": part, "case": names.pop(0), "ok": False, "died": "".join(errors)[-600:]})
