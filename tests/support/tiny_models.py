"""Tiny random decoders by the names of transformers' classes."""

from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
#: Configs of text by other names.
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def tiny_model(family: str, **options: Any) -> Any:
    """A ``LlamaForCausalLM`` of a ``LlamaConfig`` of `SIZES` and these, for example, in float32 and eval
    mode, the same weights every time."""
    import transformers  # optional

    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**SIZES | options)
    return getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
