"""Falcon, whose queries, keys and values come out of one projection in one of three orders."""

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.families import Family, register_family
from torchpaged.hf.models.own_attention import Heads, Inline, in_forward, root


def _falcon(module: Any, hidden_states: Tensor, given: dict[str, Any]) -> Heads:
    query, key, value = (
        x.transpose(1, 2) for x in _falcon_split(module, module.query_key_value(hidden_states))
    )
    cos, sin = (x.unsqueeze(1) for x in given["position_embeddings"])
    return _rotate(query, cos, sin), _rotate(key, cos, sin), value


def _falcon_split(module: Any, fused: Tensor) -> Heads:
    """``[batch, query_len, heads, head_dim]`` each, keys and values once per group, as the pools keep
    them."""
    if not module.new_decoder_architecture:
        return module._split_heads(fused)
    groups = fused.unflatten(-1, (-1, module.num_heads // module.num_kv_heads + 2, module.head_dim))
    return groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def _end(module: Any, out: Tensor, given: dict[str, Any]) -> Tensor:
    return module.dense(out)


def _refuse_alibi(config: Any) -> None:
    if config.alibi:
        raise UnsupportedModelError(
            "falcon with alibi=True cannot run through torchpaged: transformers rounds each product of slope "
            "and position to bfloat16, in any dtype, which no slope per head expresses; call generate() "
            "without past_key_values"
        )


register_family(
    Family(
        ("falcon",),
        own_attention=True,
        require_expressible=_refuse_alibi,
        class_tables=("falcon.modeling_falcon.FALCON_ATTENTION_CLASSES",),
        attention={
            "FalconAttention": in_forward(Inline(_falcon, root("head_dim"), _end, cache="layer_past"))
        },
    )
)
