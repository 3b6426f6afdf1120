"""Tiny random models of several architectures, built from configs: no downloads."""

from typing import Any

import torch
import transformers
from model_coverage.checks import prompts as padded_prompts
from transformers import PreTrainedModel

__all__ = ["COMMON", "MODELS", "SUFFIX", "padded_prompts", "paged", "tiny"]

COMMON: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
#: name -> (config class, further options); windows are shorter than the prompts
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Qwen3": ("Qwen3", {"head_dim": 16}),
    "Mistral": ("Mistral", {"sliding_window": 8}),
    "Gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "Gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "GptOss": (
        "GptOss",
        {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
SUFFIX = {"Gemma3": "Gemma3TextConfig"}


def tiny(name: str, **options: Any) -> PreTrainedModel:
    """A model in float32 and eval mode, the same weights every time."""
    torch.manual_seed(0)
    family, extra = MODELS[name]
    config = getattr(transformers, SUFFIX.get(name, f"{family}Config"))(**{**COMMON, **extra, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.set_attn_implementation("eager")
    return model


def paged(name: str = "Llama", **options: Any) -> PreTrainedModel:
    model = tiny(name, **options)
    model.set_attn_implementation("torchpaged")
    return model
