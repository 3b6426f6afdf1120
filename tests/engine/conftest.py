"""The model of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def model(make_llama: Callable[..., Any]) -> Any:
    """A tiny Llama, 99 tokens in its vocabulary."""
    return make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
