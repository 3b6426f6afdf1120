"""Runs test_interpreter.py in a process of its own: TRITON_INTERPRET must be set before kernels are defined."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreting")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    target = Path(__file__).with_name("test_interpreter.py")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(target)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 150, done.stdout[-500:]
    print(done.stdout.splitlines()[-1])


def test_cpu_tensors_without_the_interpreter_are_refused() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("already interpreting")
    pytest.importorskip("triton", reason="triton is not installed")
    import torch

    from torchpaged import BackendUnavailableError
    from torchpaged.custom_ops import BACKEND_OPS

    cache = torch.zeros(2, 4, 1, 8)
    with pytest.raises(BackendUnavailableError, match="TRITON_INTERPRET"):
        BACKEND_OPS["triton"].write_kv(torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), cache, cache.clone(), torch.tensor([4]))
