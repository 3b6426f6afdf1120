"""Images whose tokens see each other in both directions, on a GPU: a layer's second attention reads as its
context what the layer has just written, behind kernels that start early."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed; pip install 'torchpaged[hf]'")

from model_coverage.vision_models import batch_of, config_of, model_class_of, tokens_per_picture

from torchpaged.hf import PagedCache, paged

pytestmark = pytest.mark.gpu
ROWS = ("tttitttttit", "tittittttttttt", "tttttt")


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("name", ["gemma3", "paligemma2"])
def test_prompts_with_images(name: str, backend: str) -> None:
    """Five prompts through one cache, in bfloat16, against eager attention in float32."""
    config = config_of(name)
    config.text_config.head_dim = 64
    torch.manual_seed(0)
    made = model_class_of(config)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    model = made.eval()
    tokens = tokens_per_picture(model, name)
    calls = [batch_of(model, name, ROWS, tokens, seed=seed) for seed in range(5)]
    calls = [{key: x.cuda() for key, x in call.items()} for call in calls]
    model = model.cuda()
    with torch.no_grad():
        wants = [model(**call).logits for call in calls]
        model = model.to(torch.bfloat16)
        rounded = [model(**call).logits.float() for call in calls]
        cache = PagedCache(model.config, 3, 96, backend=backend)
        with paged(model):
            for call, want, eager in zip(calls, wants, rounded, strict=True):
                got, seen = model(**call, past_key_values=cache).logits.float(), call["attention_mask"].bool()
                scale = float(want.abs().max())
                rounding = float((eager - want)[seen].abs().max()) / scale
                assert float((got - want)[seen].abs().max()) / scale <= 2 * rounding + 1e-2
                cache.reset()
