"""Lightning attention, whose heads decay at fixed rates, over the states of a paged cache: MiniMax.

MiniMax refuses every cache but one of its own class, so that the base model gets a forward as well.
The modules' fields are not public; ``tests/engine/test_states.py`` runs the model under each supported
transformers.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import MoeModelOutputWithPast

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.custom_ops.plain_torch import exact
from torchpaged.hf.cache_argument import CACHE, cache_of
from torchpaged.hf.families import Family, register_family
from torchpaged.hf.packed_mixers import over_states, packed_functions, state_of_attached
from torchpaged.hf.packed_state import PackedState
from torchpaged.hf.support import records_layers


@over_states
def _forward(self: Any, layer: PackedState, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
    layer.begin(hidden_states)
    mixed, sizes = self.act_fn(self.qkv_proj(hidden_states)), hidden_states.shape[:2]
    q, k, v = mixed.view(*sizes, self.num_attention_heads, 3, -1).unbind(-2)
    g = exact(self.slope_rate).neg().view(-1).expand(*sizes, -1)
    out = layer.attend(q, k, v, g, None, scale=1.0, delta_rule=False)
    layer.complete()
    norm, gate = self.norm, self.output_gate(hidden_states)
    gated = layer.gated_norm(out, gate, norm.weight, norm.variance_epsilon, activation="sigmoid")
    return self.out_proj(gated), None


def _model_forward(self: Any, input_ids: Tensor | None = None, **options: Any) -> Any:
    """The base model's, which refuses caches of other classes than its own."""
    cache: Any = cache_of(options)
    states = options.get("inputs_embeds")
    packed = any(isinstance(layer, PackedState) for layer in getattr(cache, "layers", ()))
    if not packed or records_layers(self.config, options) or options.get("output_router_logits"):
        return type(self).forward(self, input_ids, **options)
    states = self.embed_tokens(input_ids) if states is None else states
    positions, mask = options.get("position_ids"), options.get("attention_mask")
    if positions is None:
        positions = (torch.arange(states.shape[1], device=states.device) + cache.get_seq_length())[None]
    if isinstance(mask, dict):
        mask = mask["full_attention"]
    else:
        is_sliding = self.config.sliding_window is not None
        mask = (create_sliding_window_causal_mask if is_sliding else create_causal_mask)(
            config=self.config,
            inputs_embeds=states,
            attention_mask=mask,
            position_ids=positions,
            **{CACHE: cache},
        )
    rotation = self.rotary_emb(states, positions)
    for layer in self.layers:
        states = layer(
            states,
            attention_mask=mask,
            position_embeddings=rotation,
            position_ids=positions,
            use_cache=True,
            **{CACHE: cache},
        )
    return MoeModelOutputWithPast(last_hidden_state=self.norm(states), **{CACHE: cache})


def _layer(owner: Any, index: int, config: Any, template: Any) -> Any:
    if owner.dense:
        raise UnsupportedModelError(
            "minimax runs with a cache of its own kind, or attached with pools of states and paged keys; "
            "leave dense out"
        )
    return state_of_attached(owner, index, config, template)


register_family(
    Family(
        ("minimax",),
        packed={"MiniMaxLightningAttention": _forward, "MiniMaxModel": _model_forward},
        functions=packed_functions,
        layer=_layer,
        loses_masks_made_ahead=lambda config: config.sliding_window is not None,
    )
)
