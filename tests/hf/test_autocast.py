"""torch.autocast around a model with a `PagedCache`: rotated keys come in float32 beside values in
bfloat16."""

from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of
from models import MODELS, padded_prompts, tiny
from transformers import DynamicCache

from torchpaged.hf import PagedCache, attach

#: name -> transformers' attention that it is held to
NAMES = {"Llama": "sdpa", "Mistral": "sdpa", "Gemma2": "eager", "GptOss": "eager", "deepseek_v3": "sdpa"}


@pytest.mark.slow_cases("*-True", but=("Llama-True",))
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_autocast_gives_what_transformers_own_cache_gives(name: str, compiled: bool) -> None:
    torch._dynamo.reset()
    model = tiny(name) if name in MODELS else model_of(name, "eager").eval()
    inputs = padded_prompts()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def run(cache: Any, decode: Any = model, autocast: bool = True) -> torch.Tensor:
        got = []
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for start, end in ((0, 16), (16, 17), (17, 18), (18, 19)):
                call = decode if start else model
                piece = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
                got.append(call(**piece, past_key_values=cache).logits[mask[:, start:end].bool()])
        return torch.cat(got).float()

    exact = run(DynamicCache(config=model.config), autocast=False)
    model.set_attn_implementation(NAMES[name])
    want = run(DynamicCache(config=model.config))
    attach(model)
    cache = PagedCache(model.config, 2, 32)
    got = run(cache, torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model)
    assert {layer.keys.dtype for layer in cache.paged} == {torch.bfloat16}
    assert (got - exact).abs().max() <= 1.5 * (want - exact).abs().max()
    gathered = run(PagedCache(model.config, 2, 32, dense=True))
    assert (gathered - exact).abs().max() <= 1.5 * (want - exact).abs().max()


def test_encoders_under_autocast() -> None:
    model = model_of("bert", "sdpa").eval()
    inputs = padded_prompts()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = model(**inputs).logits
        model.set_attn_implementation("torchpaged")
        torch.testing.assert_close(model(**inputs).logits, want, rtol=0.05, atol=0.02)
