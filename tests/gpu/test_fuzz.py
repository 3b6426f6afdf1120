"""A share of the random configurations of fuzz_attention.py against a float64 oracle on the GPU, each batch
run twice: the results must agree bit for bit. All in worker processes with a watchdog: a hang fails its own
test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.aims import AIMS
from worker_pool import WorkerPool

pytestmark = pytest.mark.gpu
CONFIGURATIONS, TOGETHER = 32, 8


@pytest.mark.parametrize("aim", ["", *AIMS])
@pytest.mark.parametrize("first_seed", range(1_000_000, 1_000_000 + CONFIGURATIONS, TOGETHER))
def test_random_configurations(first_seed: int, aim: str, configurations: WorkerPool) -> None:
    """A few of each kind; hundreds are the business of fuzz_attention.py."""
    shared = {
        "batches": 6,
        "backends": ["cuda", "triton"],
        "device": "cuda",
        "small": False,
        "captures": True,
        "aim": aim,
    }
    outcomes = list(configurations.run({"seed": first_seed + i, **shared} for i in range(TOGETHER)))
    assert len(outcomes) == TOGETHER
    wrong = [
        (o.case["seed"], o.kind, o.phase, o.message, (o.result or {}).get("failures"))
        for o in outcomes
        if o.result is None or o.result["failures"]
    ]
    assert not wrong


@pytest.fixture(scope="module")
def configurations() -> Iterator[WorkerPool]:
    """Several processes, since nearly all the time is the compilers'."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    with WorkerPool(
        "fuzz.case:run_case", workers=min(TOGETHER, os.cpu_count() or 1), environment=environment
    ) as pool:
        yield pool
