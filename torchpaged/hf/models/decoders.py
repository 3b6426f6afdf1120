"""Decoders with attention of their own. Scores of bloom and mpt have linear biases; falcon's queries, keys
and values come out of one projection in one of three orders; codegen, gpt_neo, gpt_neox_japanese and gptj
compute their scores in a method by the name `_attn`."""

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.attached import plain_of
from torchpaged.hf.cache_argument import CACHE, cache_of
from torchpaged.hf.families import Family, Function, register_family
from torchpaged.hf.models.own_attention import (
    Heads,
    Inline,
    in_attn,
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


#: Model type -> attention, up to transformers 5.23; from 5.24 on they call the attention interface.
_WITHOUT_INTERFACE = {"codegen": "CodeGenAttention", "gptj": "GPTJAttention"} if CACHE != "cache" else {}


def _window_of_gpt_neo(module: Any) -> int | None:
    """Of a local layer: its causal mask has so many keys in the last row."""
    return int(module.bias[0, 0, -1].sum()) if module.attention_type == "local" else None


register_family(
    Family(
        (*_WITHOUT_INTERFACE, "gpt_neo", "gpt_neox_japanese"),
        own_attention=True,
        class_tables=(
            "gpt_neo.modeling_gpt_neo.GPT_NEO_ATTENTION_CLASSES",
            *(["gptj.modeling_gptj.GPTJ_ATTENTION_CLASSES"] if _WITHOUT_INTERFACE else []),
        ),
        attention=dict.fromkeys(_WITHOUT_INTERFACE.values(), in_attn(root("head_dim")))
        | {
            "GPTNeoSelfAttention": in_attn(lambda module: 1.0, _window_of_gpt_neo),
            "GPTNeoXJapaneseAttention": in_attn(root("head_size")),
        },
    )
)


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
