"""What a model's layers store, and what they ask of a backend: found by running it once."""

from typing import Any

import torch
from transformers import PreTrainedModel

from torchpaged.backends import Limits
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.packed_mixers import pack_mixers
from torchpaged.hf.step_cache import StepCache


def probe(
    model: PreTrainedModel, config: Any, block_size: int, kv_dtype: torch.dtype | None = None
) -> StepCache:
    """A cache that knows what each layer stores, and what the layers ask of a backend.

    Found by one padding token: exact for any architecture, whatever its config calls things. The reference
    takes every attention.
    """
    limits = Limits(1, 1, 1, num_blocks=2, block_size=block_size)
    cache = StepCache(config, limits, block_size, "reference", kv_dtype)
    pack_mixers(model, cache.states)
    with torch.no_grad():
        cache.run(model, *cache.padding_step(model.device))
    missing = [i for i, layer in enumerate(cache.keeping) if not layer.is_initialized]
    if missing:
        raise UnsupportedModelError(f"{type(model).__name__}: layers {missing} never wrote to the cache")
    windows = {layer.window for layer in cache.paged} - {None}
    if windows and cache.masks.causal and not cache.masks.local:
        raise UnsupportedModelError(
            f"{type(model).__name__}: its config gives layers a window of {sorted(windows)} tokens, and it "
            "asks for no mask of a window, so that its own caches and its own forwards disagree; set "
            "model.config.sliding_window = None (and its layer_types) if it has none"
        )
    return cache
