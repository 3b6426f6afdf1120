"""The model of the engine's tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny Llama, 99 tokens in its vocabulary."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, eos_token_id=7, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()
