"""The model of the engine's GPU tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def model(make_llama: Callable[..., Any]) -> Any:
    """A small Llama in float32, 499 tokens in its vocabulary."""
    llama = make_llama(vocab_size=499, hidden_size=128, intermediate_size=192, max_position_embeddings=2048)
    return llama.to("cuda", torch.float32)
