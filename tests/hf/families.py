"""Tiny random models by the stems of their classes' names, decoders alone and encoders with decoders, in the
sizes of `model_coverage`. Two layers each or a few more, float32."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from greedy import greedy
from model_coverage.architectures import OPTIONS, config_of_class, with_random_weights
from model_coverage.encoder_decoders import FAMILIES
from transformers import PreTrainedModel

CAUSAL_CLASS = {"GPT2": "GPT2LMHeadModel"}
CONFIG_CLASS = {stem: f"{stem}TextConfig" for stem in ("Gemma3", "Gemma3n", "Gemma4", "Llama4")}


def build(
    stem: str, head: str = "ForCausalLM", implementation: str = "eager", **options: Any
) -> PreTrainedModel:
    """A model in eval mode that has no end token, the same weights every time, biases among them."""
    config_class = getattr(transformers, CONFIG_CLASS.get(stem, f"{stem}Config"))
    kind = config_class.model_type
    known = OPTIONS.get(kind, {}) if head == "ForCausalLM" else FAMILIES[kind].options
    config = config_of_class(config_class, {**known, **options})
    config.eos_token_id, config.forced_eos_token_id, config.decoder_start_token_id = None, None, 1
    model_class = getattr(transformers, CAUSAL_CLASS.get(stem, f"{stem}{head}"))
    torch.manual_seed(0)
    model = with_random_weights(model_class._from_config(config, attn_implementation=implementation))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # Doge's weights of keys, too, which must not tie
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def logits_of(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Any = None, **options: Any
) -> torch.Tensor:
    """Logits of every new token of a greedy generate(), ``[tokens, rows, vocab]``."""
    return greedy(model, inputs, cache, max_new_tokens=5, **options)[0]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within 1e-4 of the largest."""
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def same(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], make_cache: Callable[[], Any], **options: Any
) -> None:
    """generate() gives the eager path's logits through the cache that ``make_cache`` makes."""
    model.set_attn_implementation("eager")
    want = logits_of(model, inputs, **options)
    model.set_attn_implementation("torchpaged")
    close(logits_of(model, inputs, make_cache(), **options), want)
