"""What `decode_step` runs: model shapes with random weights, their rooflines, and the targets set
for one H200.

    # on the device from the start
    model = build_model(SHAPES["llama-1b"], torch.device("cuda"), torch.bfloat16)

Needs transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpaged.custom_ops.errors import ArgumentError


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model of transformers' ``family``; ``tied``: lm_head and embedding are one tensor."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    family: str = "llama"

    def weights_read(self) -> int:
        """Weights that a decode step reads: all layers and the lm_head once; of the embedding, a row per
        token, which is not counted."""
        heads = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = self.hidden_size * (heads + 3 * self.intermediate_size + 2)
        return self.num_layers * layer + self.hidden_size * (self.vocab_size + 1)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Keys and values of one token in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * itemsize

    def bytes_read(self, batch: int, context: int, itemsize: int) -> int:
        """Bytes a decode step can't avoid: weights once, and the keys and values of ``batch`` requests of
        ``context`` tokens."""
        return self.weights_read() * itemsize + batch * context * self.kv_bytes_per_token(itemsize)


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("llama-1b", 2048, 8192, 16, 32, 8, 64, 128256, tied=True),  # Llama-3.2-1B
        ModelShape("llama-8b", 4096, 14336, 32, 32, 8, 128, 128256, tied=False),  # Llama-3-8B
        ModelShape("qwen3-0.6b", 1024, 3072, 28, 16, 8, 128, 151936, tied=True, family="qwen3"),
        ModelShape("tiny", 64, 128, 3, 4, 2, 16, 512, tied=True),  # for a CPU: seconds
    )
}
#: Milliseconds per step aimed at on one H200 in bf16 at a context of 2048, by shape and batch.
TARGETS_MS = {
    ("llama-1b", 1): 0.75,
    ("llama-1b", 8): 0.90,
    ("llama-1b", 64): 1.85,
    ("llama-8b", 1): 3.95,
    ("llama-8b", 8): 4.5,
    ("llama-8b", 32): 6.1,
    ("llama-8b", 64): 8.1,
}


def select_shapes(names: Sequence[str]) -> list[ModelShape]:
    """Shapes by name.

    Raises:
        ArgumentError: there is no such shape.
    """
    for name in names:
        if name not in SHAPES:
            raise ArgumentError("shapes", f"some of {', '.join(SHAPES)}", repr(name))
    return [SHAPES[name] for name in names]


def model_config(shape: ModelShape) -> Any:
    """transformers' config of that shape; nothing of it is downloaded."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        shape.family,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.9 * shape.hidden_size**-0.5,
    )


def build_model(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Any:
    """A HuggingFace model of that shape with normal weights, made on ``device`` itself; the same ones
    every time.

    Their deviation is 0.9 / sqrt(hidden_size), 0.02 for 2048: a layer's output is then about as large as its
    normalised input at any size, so that an error in any layer shows in the logits.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(model_config(shape), dtype=dtype).eval()
    model.requires_grad_(False)
    return model
