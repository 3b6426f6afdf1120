"""What a mask of ours holds travels on the mask itself: transformers gives an attention function nothing else
of what its mask function was told. These tests notice when that changes."""

from typing import Any

import torch
from models import padded_prompts, tiny
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from torchpaged.hf import NAME, PagedCache, attention


def test_what_transformers_tells(monkeypatch: Any) -> None:
    """The cache reaches neither function, and of the forward the attention function gets the mask alone."""
    told: dict[str, set[str]] = {}

    def attend(*args: Any, **given: Any) -> Any:
        told["attention"] = set(given)
        return attention.paged_attention_forward(*args, **given)

    def mask(**given: Any) -> Any:
        told["mask"] = set(given)
        return attention.paged_mask(**given)

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, attend)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, NAME, mask)
    model = tiny("Llama")
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        model(**padded_prompts(), past_key_values=PagedCache(model.config, 8, 64))
    assert "scaling" in told["attention"]
    assert "mask_function" in told["mask"]
    for names in told.values():
        assert not {name for name in names if ("cache" in name and name != "use_cache") or "past" in name}


def test_masks_of_four_dimensions_are_handed_on() -> None:
    """A mask made ahead of a forward reaches each layer as it is."""
    model, masks = tiny("Llama"), []
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, 8, 64)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda module, args, given: masks.append(given["attention_mask"]), with_kwargs=True
        )
    with torch.no_grad():
        prepared = model.prepare_inputs_for_generation(**padded_prompts(), past_key_values=cache)
        model(**prepared)
    assert prepared["attention_mask"].dim() == 4
    assert len(masks) == len(model.model.layers)
    assert all(mask is prepared["attention_mask"] for mask in masks)
