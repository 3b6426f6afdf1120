"""The model of the engine's GPU tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def model() -> Any:
    """A small Llama in float32, 499 tokens in its vocabulary."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=499, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2048, eos_token_id=7, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to("cuda", torch.float32).eval()
