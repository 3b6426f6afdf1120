"""What a new attention configuration costs: seconds of the first call less those of the second, in a
fresh process.

    python benchmarks/bench_cold_attention.py --json cold.json
    python benchmarks/bench_cold_attention.py --only cuda/prefill triton/mixed

Each case runs twice, each time in a process of its own: with every cache empty, then with what the first left
on the disk. Importing torch and making the context lie before the first call; importing Triton and
cuda-bindings lies within it, and is also told apart: it is paid once per process, whatever the number of
configurations. ``cpu``: seconds of all threads and child processes, the host's load left out.
"""

from __future__ import annotations

import argparse
import builtins
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import BatchSpec, make_batch, run_paged_attention

SPECS = {
    "decode": BatchSpec("decode", (300, 40, 1000), (1, 1, 1)),
    "prefill": BatchSpec("prefill", (300, 300), (300, 300)),
    "mixed": BatchSpec("mixed", (300, 40, 1000, 7), (300, 1, 1, 1)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"window_left": 100, "chunk_size": 256, "logits_soft_cap": 6.0},
}
FP8 = {"kv_dtype": torch.float8_e4m3fn, "scales": "per_head"}
SHAPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": FP8,
    "head_72": {"head_dim": 72},
    "fp8_head_72": {"head_dim": 72, **FP8},
}


class Case(NamedTuple):
    """A backend, a batch of `SPECS`, options of `OPTIONS` and a shape of `SHAPES`."""

    backend: str
    batch: str
    options: str
    shape: str = "bf16"


CASES = [
    Case(backend, batch, options) for backend in ("cuda", "triton") for batch in SPECS for options in OPTIONS
]
CASES += [Case("cuda", batch, options, "fp8") for batch in ("decode", "mixed") for options in OPTIONS]
CASES += [Case("triton", "mixed", "everything", shape) for shape in ("fp8", "head_72", "fp8_head_72")]


class ImportClock:
    """Seconds spent in import statements while it is entered; statements within imported modules are part of
    the outermost one."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._import: Callable[..., Any] = builtins.__import__

    def _timed(self, *arguments: Any, **options: Any) -> Any:
        self._depth += 1
        begin = time.perf_counter()
        try:
            return self._import(*arguments, **options)
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.perf_counter() - begin

    def __enter__(self) -> ImportClock:
        builtins.__import__ = self._timed
        return self

    def __exit__(self, *error: object) -> None:
        builtins.__import__ = self._import


def cpu_seconds() -> float:
    """User and system time of this process and of the children it waited for."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def measure(case: Case) -> dict[str, float]:
    """In the child: seconds of the first call less the second's, of imports within the first, and of its
    CPU time."""
    shape = {
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "dtype": torch.bfloat16,
        "device": "cuda",
        **SHAPES[case.shape],
    }
    batch = make_batch(
        SPECS[case.batch], sinks=case.options == "everything", alibi=case.options == "everything", **shape
    )
    seconds, cpu = [], []
    with ImportClock() as imports:
        for _ in range(2):
            torch.cuda.synchronize()
            begin, begin_cpu = time.perf_counter(), cpu_seconds()
            run_paged_attention(BACKEND_OPS[case.backend], batch, **OPTIONS[case.options])
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            cpu.append(cpu_seconds() - begin_cpu)
    return {
        "seconds": seconds[0] - seconds[1],
        "import_seconds": imports.seconds,
        "cpu_seconds": cpu[0] - cpu[1],
    }


def run_twice(case: Case, timeout: float) -> dict[str, object]:
    """A row of the report: the case, and what a process measured with empty caches and one with those that
    the first left."""
    row: dict[str, object] = dict(case._asdict())
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "TORCHPAGED_CACHE": f"{folder}/torchpaged",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "CUDA_CACHE_DISABLE": "1",
        }
        if case[:2] == ("cuda", "prefill"):
            environment["TORCHPAGED_CUDA_PREFILL"] = "1"
        for disk in ("cold", "warm"):
            command = [sys.executable, __file__, "--child", *case]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
            if done.returncode:
                return row | {"error": done.stderr[-2000:], "disk": disk}
            row |= {
                f"{disk}_{name}": round(value, 3)
                for name, value in json.loads(done.stdout.splitlines()[-1]).items()
            }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of BACKEND/BATCH/OPTIONS/SHAPE")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a process")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(Case(*arguments.child))))
        return
    cases = [case for case in CASES if "/".join(case).startswith(tuple(arguments.only))]
    if not cases:
        parser.error(
            f"--only {' '.join(arguments.only)}: no such case; there are "
            f"{', '.join('/'.join(case) for case in CASES)}"
        )
    results = []
    for case in cases:
        results.append(run_twice(case, arguments.timeout))
        print(json.dumps(results[-1]), flush=True)
        if arguments.json:  # after each case: what is measured is kept if a later case fails
            about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cpus": os.cpu_count()}
            arguments.json.write_text(json.dumps({**about, "results": results}, indent=1))
    if any("error" in row for row in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
