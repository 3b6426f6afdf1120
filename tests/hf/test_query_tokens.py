"""Which cache writes let an attention start early: those of its own query tokens, and in no other case (docs/decode_loop.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import padded_prompts, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BartConfig, BartForConditionalGeneration, EncoderDecoderCache, PreTrainedModel

from torchpaged.hf import PagedCache

BART: dict[str, Any] = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "init_std": 0.5,
}  # fmt: skip


class Writes(TorchDispatchMode):
    """``(tokens, are_query_tokens)`` of every `write_kv`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("torchpaged::write_kv"):
            self.seen.append((len(args[0]), (kwargs or {}).get("are_query_tokens", False)))
        return func(*args, **(kwargs or {}))


def written(model: PreTrainedModel, cache: Any, **inputs: torch.Tensor) -> list[tuple[int, bool]]:
    with torch.no_grad(), Writes() as writes:
        model(**inputs, past_key_values=cache)
    return writes.seen


def test_a_decoder_writes_its_query_tokens() -> None:
    """The first layer's write comes right behind what it computes of the step, and lets nothing start early."""
    model, inputs = tiny("Llama"), padded_prompts()
    model.set_attn_implementation("torchpaged")
    writes = written(model, PagedCache(model.config, 8, 64), **inputs)
    num_tokens, others = inputs["input_ids"].numel(), model.config.num_hidden_layers - 1
    assert others and writes == [(num_tokens, False), *[(num_tokens, True)] * others]
    writes = written(model, PagedCache(model.config, 8, 64, dense=True), **inputs)
    assert writes == [(num_tokens, False)] * (others + 1)


@pytest.mark.parametrize("query_len", [1, 3])
def test_an_encoders_keys_are_context(query_len: int) -> None:
    """Cross attention over a paged cache: the queries read keys that were written right before, are not their own, and are not as many."""
    torch.manual_seed(0)
    model = BartForConditionalGeneration(BartConfig(**BART)).eval()
    inputs = {"input_ids": torch.randint(4, 99, (2, 20)), "decoder_input_ids": torch.randint(4, 99, (2, query_len))}
    with torch.no_grad():
        want = model(**inputs).logits
        model.set_attn_implementation("torchpaged")
        cache = EncoderDecoderCache(*(PagedCache(model.config, 2, 32) for _ in range(2)))
        torch.testing.assert_close(model(**inputs, past_key_values=cache).logits, want)
    cache = EncoderDecoderCache(*(PagedCache(model.config, 2, 32) for _ in range(2)))
    assert written(model, cache, **inputs) == [(2 * query_len, False), (40, False)] * 2
