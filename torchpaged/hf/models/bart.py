"""BART's descendants with attention of their own, and their position embeddings: led, mvp, trocr, xglm."""

from typing import Any

import torch
from torch import Tensor, nn

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.attached import plain_of
from torchpaged.hf.attention import paged_attention_forward
from torchpaged.hf.cache_argument import cache_of
from torchpaged.hf.families import Family, Function, register_family
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.models.own_attention import (
    Heads,
    Inline,
    in_forward,
    positions_from_length,
    project_out,
    split_heads,
)


def _require_no_prompt(module: Any, given: dict[str, Any]) -> None:
    if given.get("attn_prompt") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} puts a trained prompt before its cached keys, which the paged pools "
            "don't hold"
        )


def _bart(module: Any, hidden_states: Tensor, given: dict[str, Any]) -> Heads:
    _require_no_prompt(module, given)
    width = module.head_dim
    return tuple(
        split_heads(project(hidden_states), width)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )  # type: ignore[return-value]


def _cross_attention(module: Any, hidden_states: Tensor, given: dict[str, Any], scaling: float) -> Any:
    """The encoder's keys are written by the first step and read by all; None where they are in no pools."""
    both, index = cache_of(given), module.layer_idx
    layers = getattr(getattr(both, "cross_attention_cache", None), "layers", ())
    if both is None or index >= len(layers) or not isinstance(layers[index], PagedLayer):
        return None
    _require_no_prompt(module, given)
    if both.is_updated.get(index):
        key, value = layers[index].keys, layers[index].values
    else:
        states = given["key_value_states"]
        key, value = (
            split_heads(project(states), module.head_dim) for project in (module.k_proj, module.v_proj)
        )
        key, value = both.cross_attention_cache.update(key, value, index)
        both.is_updated[index] = True
    query = split_heads(module.q_proj(hidden_states), module.head_dim)
    mask = given.get("attention_mask")
    out, weights = paged_attention_forward(
        module, query, key, value, mask, scaling=scaling, is_causal=False, masks_itself=True
    )
    return module.out_proj(out.flatten(2)), weights


_ATTENTION = in_forward(
    Inline(
        _bart, lambda module: module.scaling, project_out, crosses="key_value_states", cross=_cross_attention
    )
)


def _led(module: nn.Module) -> Function:
    """As Bart's, and gives its cache back as a third."""
    made = _ATTENTION(module)
    assert made is not None
    name, attend = made

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        out = attend(self, hidden_states, *args, **options)
        return out if len(out) == 3 else (*out, cache_of(options))

    return name, forward


def _places_from(module: Any) -> Function:
    """`positions_from_length` of LED, which takes no positions."""
    plain = plain_of(module, "forward")

    def forward(self: Any, input_ids_shape: Any, past_length: Any = 0) -> Tensor:
        if not isinstance(past_length, Tensor):
            return plain(self, input_ids_shape, past_length)
        places = torch.arange(input_ids_shape[1], device=self.weight.device) + past_length
        return nn.functional.embedding(places, self.weight)

    return "forward", forward


def _sinusoids(module: Any) -> Function:
    """Position embeddings whose table grows with the cache's length, which compiled code can't look at: there
    a position past the table raises."""
    plain = plain_of(module, "forward")

    def forward(self: Any, position_ids: Tensor, past_length: Any = 0) -> Tensor:
        if not (torch.compiler.is_compiling() and isinstance(past_length, Tensor)):
            return plain(self, position_ids, past_length)
        rows: Tensor = self.weights.index_select(0, position_ids.flatten() + self.offset)
        return rows.view(*position_ids.shape, -1).detach()

    return "forward", forward


register_family(
    Family(
        ("led", "mvp"),
        own_attention=True,
        pages_cross_attention=True,
        attention={"LEDDecoderAttention": _led, "MvpAttention": _ATTENTION},
        modules={
            "LEDLearnedPositionalEmbedding": _places_from,
            "MvpLearnedPositionalEmbedding": positions_from_length,
        },
    )
)
register_family(
    Family(
        ("trocr", "xglm"),
        own_attention=True,
        attention={"TrOCRAttention": _ATTENTION, "XGLMAttention": _ATTENTION},
        modules={
            "TrOCRLearnedPositionalEmbedding": positions_from_length,
            "XGLMSinusoidalPositionalEmbedding": _sinusoids,
        },
    )
)
