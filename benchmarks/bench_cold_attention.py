"""What a new attention configuration costs: seconds of the first call less those of the second, in a fresh process.

    python benchmarks/bench_cold_attention.py --json cold.json

Each case runs twice, each time in a process of its own: with every cache empty, then with what the first left on the disk. Importing torch
and making the context lie before the first call; importing Triton and cuda-bindings lies within it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import BatchSpec, make_batch, run_paged_attention

SPECS = {
    "decode": BatchSpec("decode", (300, 40, 1000), (1, 1, 1)),
    "prefill": BatchSpec("prefill", (300, 40), (300, 40)),
    "mixed": BatchSpec("mixed", (300, 40, 1000, 7), (300, 1, 1, 1)),
}
OPTIONS = {"plain": {}, "everything": {"window_left": 100, "chunk_size": 256, "logits_soft_cap": 6.0}}
CASES = [
    (backend, spec, option)
    for backend in ("cuda", "triton")
    for spec in SPECS
    for option in OPTIONS
    if (backend, spec) != ("cuda", "prefill")
]


def measure(backend: str, spec: str, option: str) -> None:
    """In the child: print the seconds of two calls."""
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    batch = make_batch(SPECS[spec], sinks=option == "everything", alibi=option == "everything", **shape)
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run_paged_attention(BACKEND_OPS[backend], batch, **OPTIONS[option])
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    print(json.dumps(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure(*arguments.child)
        return
    results = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "TORCHPAGED_CACHE": f"{folder}/torchpaged", "TRITON_CACHE_DIR": f"{folder}/triton",
                           "CUDA_CACHE_DISABLE": "1"}  # fmt: skip
            row: dict[str, object] = dict(zip(("backend", "batch", "options"), case, strict=True))
            for disk in ("cold", "warm"):
                done = subprocess.run(
                    [sys.executable, __file__, "--child", *case], env=environment, capture_output=True, text=True, timeout=300
                )
                if done.returncode:
                    raise SystemExit(f"{case}, {disk}: {done.stderr[-2000:]}")
                first, second = json.loads(done.stdout.splitlines()[-1])
                row[f"{disk}_seconds"] = round(first - second, 3)
        print(json.dumps(row), flush=True)
        results.append(row)
    if arguments.json:
        device = torch.cuda.get_device_name()
        arguments.json.write_text(
            json.dumps({"gpu": device, "torch": torch.__version__, "cpus": os.cpu_count(), "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
