"""The model of the engine's tests."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from engine_requests import EACH, PROMPTS, TINY, engine, faulty_model, tokens_of

if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def model(make_llama: Callable[..., Any]) -> Any:
    """A tiny Llama, 99 tokens in its vocabulary."""
    return make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)


@pytest.fixture(scope="module")
def llama(make_llama: Callable[..., Any]) -> Any:
    """A Llama of `TINY` sizes."""
    return make_llama(**TINY)


@pytest.fixture(scope="module")
def faulty(make_llama: Callable[..., Any]) -> Any:
    """A `faulty_model` of `TINY` sizes."""
    return faulty_model(make_llama(**TINY))


@pytest.fixture(scope="module")
def want(faulty: Any) -> list[list[int]]:
    """What it gives for `PROMPTS` where nothing goes wrong."""
    return tokens_of(engine(faulty, graphs=False).generate(PROMPTS, EACH))
