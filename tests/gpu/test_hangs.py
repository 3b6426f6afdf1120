"""Batches on which attention never ended do end, with right results; each under a watchdog, in a process that
can be killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hanging_batches import CASES, SEEN
from watched_process import WatchedProcess

pytestmark = pytest.mark.gpu
BACKENDS = ("triton", "cuda")


@pytest.fixture(scope="module")
def worker() -> Iterator[WatchedProcess]:
    one = WatchedProcess("hang_worker.py", compile_seconds=300)
    yield one
    one.stop()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_ends(worker: WatchedProcess, backend: str, name: str) -> None:
    worker.run(f"once {backend} {name}")


@pytest.mark.parametrize("name", [*SEEN, "fp8_more_queries", "padded_of_128", "fp8_prompt_2k"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_in_a_graph_with_other_lengths(worker: WatchedProcess, backend: str, name: str) -> None:
    worker.run(f"replay {backend} {name}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_mixed_batches(worker: WatchedProcess, backend: str) -> None:
    """The decode launch of a mixed batch starts beside the prefill launch, without a wait of its own."""
    worker.run(f"layers {backend} mixed")


def test_the_watchdog_notices() -> None:
    """A process that never answers is a failure that names its case, and is gone afterwards."""
    one = WatchedProcess("hang_worker.py", compile_seconds=300)
    one.start()
    process = one.process
    with pytest.raises(pytest.fail.Exception, match=r"sleeper: no 'done' within 1 s: it hangs"):
        one.expect("done", 1, "sleeper")
    assert process is not None
    assert process.poll() is not None
    assert one.process is None
