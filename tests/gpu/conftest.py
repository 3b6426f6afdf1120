"""The model of the engine's GPU tests, and the quick part of the suite."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchpaged.backends import get_backend


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``-m "gpu and quick"``: the first case of each test of the GPU suite but ``slow`` and ``long`` ones."""
    seen: set[str] = set()
    for item in items:
        name = item.nodeid.split("[")[0]
        if "gpu" in item.keywords and name not in seen and not {"slow", "long"} & set(item.keywords):
            item.add_marker("quick")
            seen.add(name)


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    why = get_backend(request.param).unavailable()
    if why:
        pytest.skip(why)
    return str(request.param)


@pytest.fixture(scope="module")
def model(make_llama: Callable[..., Any]) -> Any:
    """A small Llama in float32, 499 tokens in its vocabulary."""
    llama = make_llama(vocab_size=499, hidden_size=128, intermediate_size=192, max_position_embeddings=2048)
    return llama.to("cuda", torch.float32)
