"""Runs test_interpreter.py in a process of its own: TRITON_INTERPRET must be set before kernels
are defined."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreting")
@pytest.mark.parametrize(
    ("chosen", "at_least"), [("not slow", 150), pytest.param("slow", 105, marks=pytest.mark.slow)]
)
def test_kernels_in_the_interpreter(interpreter: None, chosen: str, at_least: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    target = Path(__file__).with_name("test_interpreter.py")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(target)]
    halves = [
        subprocess.Popen(
            [*command, "-m", chosen, "-k", half],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for half in ("matches_the_oracle", "not matches_the_oracle")
    ]
    total = 0
    for half in halves:
        output, _ = half.communicate(timeout=550)
        assert half.returncode == 0, output[-6000:]
        passed = re.search(r"(\d+) passed", output)
        assert passed, output[-500:]
        total += int(passed[1])
    assert total >= at_least, total


def test_cpu_tensors_without_the_interpreter_are_refused() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("already interpreting")
    pytest.importorskip("triton", reason="triton is not installed")
    import torch

    from torchpaged import BackendUnavailableError
    from torchpaged.custom_ops import BACKEND_OPS

    cache = torch.zeros(2, 4, 1, 8)
    with pytest.raises(BackendUnavailableError, match="TRITON_INTERPRET"):
        BACKEND_OPS["triton"].write_kv(
            torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), cache, cache.clone(), torch.tensor([4])
        )
