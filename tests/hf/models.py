"""Tiny random models of several architectures, built from configs: no downloads."""

from typing import Any

from model_coverage.checks import prompts as padded_prompts
from tiny_models import SIZES, tiny_model
from transformers import PreTrainedModel

__all__ = ["COMMON", "MODELS", "padded_prompts", "paged", "tiny"]

COMMON = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
#: name -> further options; windows are shorter than the prompts
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 8},
    "Gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "Gemma3": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "GptOss": {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def tiny(name: str, **options: Any) -> PreTrainedModel:
    """A model in float32 and eval mode, the same weights every time."""
    model = tiny_model(name, **{**COMMON, **MODELS[name], **options})
    model.set_attn_implementation("eager")
    return model


def paged(name: str = "Llama", **options: Any) -> PreTrainedModel:
    model = tiny(name, **options)
    model.set_attn_implementation("torchpaged")
    return model
