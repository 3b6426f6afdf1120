"""Gemma 3n and 4, whose last layers attend over keys of layers before them, and the masks of Gemma 3
and 4 and PaliGemma."""

from typing import Any

import torch
import transformers

from torchpaged.hf.attached import plain_of
from torchpaged.hf.families import Family, Function, register_family
from torchpaged.hf.layer import PagedLayer, layer_of

#: The transformers from which on generate() gives Gemma4's token types to the masks that it makes ahead.
_GIVES_TYPES = (5, 23)


def _shared_keys(module: Any) -> Function | None:
    """Layers that attend over another layer's pools, which transformers 5.17 takes through ``Tensor.to``:
    behind it compiled code no longer knows them, so that they are handed on apart."""
    if not getattr(module, "is_kv_shared_layer", False):
        return None
    plain = plain_of(module, "forward")
    index = getattr(module, "kv_shared_layer_index", None)
    place = module.layer_type if index is None else index

    def forward(self: Any, *args: Any, shared_kv_states: Any = None, **options: Any) -> Any:
        if torch.compiler.is_compiling() and shared_kv_states is not None:
            key, value = shared_kv_states[place]
            if isinstance(layer_of(key), PagedLayer):
                options = {**options, "shared_pools": (key, value)}
        return plain(self, *args, shared_kv_states=shared_kv_states, **options)

    return "forward", forward


def _text_of(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def _has_window(config: Any) -> bool:
    """PaliGemma with windows can't take masks made ahead for layers of two kinds."""
    return getattr(_text_of(config), "sliding_window", None) is not None


def _lacks_types(config: Any) -> bool:
    """generate() of an older transformers makes Gemma 4's masks without its token types."""
    by_types = getattr(_text_of(config), "use_bidirectional_attention", None) == "vision"
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    return by_types and version < _GIVES_TYPES


def _sees_ahead(config: Any) -> bool:
    """generate() makes the masks of Gemma 3's text causal, where the model lets tokens see those behind them
    (EmbeddingGemma)."""
    return bool(config.use_bidirectional_attention)


_GEMMA4 = tuple(name for name in transformers.CONFIG_MAPPING if name.startswith("gemma4"))

register_family(Family(("gemma3_text",), loses_masks_made_ahead=_sees_ahead))
register_family(Family(("paligemma",), loses_masks_made_ahead=_has_window))
register_family(
    Family(
        _GEMMA4,
        loses_masks_made_ahead=_lacks_types,
        modules=dict.fromkeys(("Gemma4TextAttention", "Gemma4UnifiedTextAttention"), _shared_keys),
    )
)
register_family(Family(modules={"Gemma3nTextAttention": _shared_keys}))
