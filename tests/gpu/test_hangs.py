"""Batches on which attention never ended do end, with right results; each under a watchdog, in a process that
can be killed."""

from collections.abc import Callable, Iterator

import pytest
from hanging_batches import CASES, SEEN
from watched import watched

pytestmark = pytest.mark.gpu
BACKENDS = ("triton", "cuda")


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., None]]:
    with watched("hang_worker:run", launching=300) as run:
        yield run


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_ends(run: Callable[..., None], backend: str, name: str) -> None:
    run(kind="once", backend=backend, name=name)


@pytest.mark.parametrize("name", [*SEEN, "fp8_more_queries", "padded_of_128", "fp8_prompt_2k"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_in_a_graph_with_other_lengths(run: Callable[..., None], backend: str, name: str) -> None:
    run(kind="replay", backend=backend, name=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_mixed_batches(run: Callable[..., None], backend: str) -> None:
    """The decode launch of a mixed batch starts beside the prefill launch, without a wait of its own."""
    run(kind="layers", backend=backend, name="mixed")
