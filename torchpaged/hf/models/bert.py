"""BERT's descendants with attention of their own, as decoders: big_bird, megatron-bert, rembert, roformer."""

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.attached import plain_of
from torchpaged.hf.cache_argument import CACHE, cache_of
from torchpaged.hf.families import Family, Function, register_family
from torchpaged.hf.models.own_attention import (
    Heads,
    Inline,
    in_forward,
    positions_from_length,
    root,
    split_heads,
)
from torchpaged.hf.support import lacks_causal_mask


def _bert(module: Any, hidden_states: Tensor, given: dict[str, Any]) -> Heads:
    width = module.attention_head_size
    return tuple(
        split_heads(project(hidden_states), width) for project in (module.query, module.key, module.value)
    )  # type: ignore[return-value]


def _roformer(module: Any, hidden_states: Tensor, given: dict[str, Any]) -> Heads:
    query, key, value = _bert(module, hidden_states, given)
    positions = given.get("sinusoidal_pos")
    if positions is None:
        return query, key, value
    if module.rotary_value:
        return module.apply_rotary_position_embeddings(positions, query, key, value)
    return (*module.apply_rotary_position_embeddings(positions, query, key), value)


def _out(module: Any, out: Tensor, given: dict[str, Any]) -> Tensor:
    return out


def _causal(module: Any) -> Function | None:
    """The mask that a decoder of such a file needs; with a paged cache, transformers' mask function tells it
    the padding."""
    if not lacks_causal_mask(module):
        return None
    plain = plain_of(module, "forward")

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **given: Any,
    ) -> Any:
        states: Tensor | None = input_ids if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if states is None:
            return plain(self, input_ids, attention_mask, *args, **given)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=torch.empty(*states.shape[:2], 0, dtype=self.dtype, device=states.device),
            attention_mask=attention_mask,
            **{CACHE: cache_of(given)},
        )
        if mask is None:  # nothing looks at it, and the module makes one of its own where none comes
            mask = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=states.device)
        return plain(self, input_ids, mask, *args, **given)

    return "forward", forward


def _refuse_block_sparse(config: Any) -> None:
    if config.attention_type != "original_full":
        raise UnsupportedModelError(
            f"big_bird with attention_type={config.attention_type!r} selects blocks of keys at random; load "
            "it with attention_type='original_full'"
        )


_ATTENTION, _ROTATED = (
    in_forward(Inline(heads, root("attention_head_size"), _out, crosses="encoder_hidden_states"))
    for heads in (_bert, _roformer)
)

register_family(
    Family(
        ("big_bird",),
        own_attention=True,
        may_lack_causal_mask=True,
        require_expressible=_refuse_block_sparse,
        attention={"BigBirdSelfAttention": _ATTENTION},
        modules={"BigBirdModel": _causal},
    )
)
register_family(
    Family(
        ("megatron-bert", "rembert", "roformer"),
        own_attention=True,
        may_lack_causal_mask=True,
        attention={
            "MegatronBertSelfAttention": _ATTENTION,
            "RemBertSelfAttention": _ATTENTION,
            "RoFormerSelfAttention": _ROTATED,
        },
        modules={
            "MegatronBertModel": _causal,
            "RemBertModel": _causal,
            "RoFormerModel": _causal,
            "RoFormerSinusoidalPositionalEmbedding": positions_from_length,
        },
    )
)
