"""The CUDA C++ prefill kernel on random batches: it ends, its results are right, and the same every time;
under a watchdog."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from prefill_worker import CONFIGURATIONS
from watched_process import WatchedProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the kernel is written for compute capability 9.0",
    ),
]
BATCHES = 25  # of each configuration


@pytest.fixture(scope="module")
def worker() -> Iterator[WatchedProcess]:
    one = WatchedProcess("prefill_worker.py", compile_seconds=120)
    yield one
    one.stop()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_random_batches(worker: WatchedProcess, name: str) -> None:
    for seed in range(BATCHES):
        worker.run(f"{name} {seed}")
