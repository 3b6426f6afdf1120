"""Decoders whose scores have linear biases: bloom and mpt."""

from typing import Any

from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.attached import plain_of
from torchpaged.hf.cache_argument import cache_of
from torchpaged.hf.families import Family, Function, register_family
from torchpaged.hf.models.own_attention import (
    Heads,
    Inline,
    in_forward,
    paged_cache_of,
    project_out,
    root,
    split_heads,
)


def _bloom(module: Any, hidden_states: Tensor, given: dict[str, Any]) -> Heads:
    return module._reshape(module.query_key_value(hidden_states))


def _bloom_end(module: Any, out: Tensor, given: dict[str, Any]) -> Tensor:
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise UnsupportedModelError(
            "bloom with slow_but_exact sums slices of its output projection, which the paged path does not; "
            "load it with slow_but_exact=False"
        )
    return module.dense(out) + given["residual"]


def _masks_of_bloom(model: Any) -> Function:
    """Bloom gives generate() a 2-D mask as long as its cache, zeros behind the last token, to build biases
    from, which the pools don't need. A prompt gets the user's mask, and asks for its own in the forward."""
    name = "create_masks_for_generate"
    plain = plain_of(model, name) if hasattr(model, name) else None  # transformers 5.17 has none

    def create_masks(self: Any, *args: Any, **given: Any) -> Any:
        is_paged = paged_cache_of(cache_of(given), 0) is not None
        if is_paged and given["inputs_embeds"].shape[1] > 1:
            return given["attention_mask"]
        if is_paged or plain is None:
            return create_masks_for_generate(*args, **given)
        return plain(self, *args, **given)

    return name, create_masks


def _mpt(module: Any, hidden_states: Tensor, given: dict[str, Any]) -> Heads:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    return tuple(split_heads(part, module.head_dim) for part in mixed.chunk(3, dim=-1))  # type: ignore[return-value]


register_family(
    Family(
        ("bloom",),
        own_attention=True,
        asks_again=True,
        attention={
            "BloomAttention": in_forward(
                Inline(_bloom, root("head_dim"), _bloom_end, cache="layer_past", alibi=True)
            )
        },
        modules={"BloomForCausalLM": _masks_of_bloom},
    )
)
register_family(
    Family(
        ("mpt",),
        own_attention=True,
        takes_no_none=True,
        attention={
            "MptAttention": in_forward(
                Inline(_mpt, lambda module: module.softmax_scale, project_out, alibi=True)
            )
        },
    )
)
