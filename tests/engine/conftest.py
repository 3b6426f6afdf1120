"""The model of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine_requests import EACH, PROMPTS, engine, tokens_of


@pytest.fixture(scope="module")
def model(make_llama: Callable[..., Any]) -> Any:
    """A tiny Llama, 99 tokens in its vocabulary."""
    return make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)


@pytest.fixture(scope="module")
def want(model: Any) -> list[list[int]]:
    """What a module's faulty model gives for `PROMPTS` where nothing goes wrong."""
    return tokens_of(engine(model, graphs=False).generate(PROMPTS, EACH))
