"""compute-sanitizer's memcheck and racecheck over small launches: attention, and the indexer's kernels."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "tool"),
    [
        *itertools.product(("cuda", "triton", "sparse"), ("memcheck", "racecheck")),
        ("latent", "memcheck"),  # docs/log/latent_pairs.md, latent_fp8.md: what racecheck finds
    ],
)
def test_sanitizer_is_clean(backend: str, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed")
    root = Path(__file__).parents[2]
    script = [sys.executable, str(Path(__file__).with_name("sanitize_cases.py")), backend]
    if tool == "racecheck":
        script.append("every-lane")  # sanitize_cases.py says why
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(root)}
    # compiles outside the tool
    subprocess.run(script, cwd=root, env=environment, check=True, capture_output=True, timeout=300)
    # torch's and cuda-bindings' probing for driver symbols would count as API errors
    command = [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        *(["--report-api-errors", "no"] if tool == "memcheck" else []),
        *script,
    ]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    clean = "ERROR SUMMARY: 0 errors" if tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards"
    assert f"{backend}: done" in done.stdout, done.stdout[-2000:]
    assert clean in done.stdout, done.stdout[-2000:]
