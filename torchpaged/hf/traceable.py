"""Modules that call the attention interface and whose other code breaks a trace: forwards of ours that
compute the same in one graph.

Each takes the place of the module's own forward, on the instance, and calls it wherever nothing is traced.
`torchpaged.hf.attach` puts them in, `detach` takes them out.

The modules' names and fields are not public; ``tests/hf/test_traceable.py`` compares each with what it
replaces under each supported transformers, and notices one that needs it no more.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast

from torchpaged.hf.layer import PagedLayer, layer_of
from torchpaged.hf.replaced import plain_of

Function = tuple[str, Callable[..., Any]]


# ------------------------------------------------------------------------------------------------- experts
def _routed(top_k_index: Tensor, top_k_weights: Tensor, num_experts: int) -> Tensor:
    """Weight of each expert for each token, ``[num_tokens, num_experts]``; 0 where it was not chosen."""
    zeros = top_k_weights.new_zeros(top_k_weights.shape[0], num_experts)
    return zeros.scatter_add(1, top_k_index, top_k_weights)


def _through_experts(
    states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    num_experts: int,
    run: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """The weighted sum over each token's experts, without a shape that depends on the routing.

    Few tokens take the weights of their own experts; many pass through every expert, so that no weight is
    copied per token.

    Args:
        states: ``[num_tokens, hidden_size]``.
        top_k_index, top_k_weights: ``[num_tokens, top_k]``.
        num_experts: that have weights.
        run: ``(x [count, rows, hidden_size], which experts [count] or None for all) -> the same shape``.
    """
    num_tokens, top_k = top_k_index.shape
    if num_tokens * top_k <= num_experts:
        each = states.repeat_interleave(top_k, 0)[:, None]
        found = run(each, top_k_index.flatten())[:, 0].view(num_tokens, top_k, -1)
        return (found * top_k_weights[..., None].to(found.dtype)).sum(1)
    found = run(states[None].expand(num_experts, -1, -1), None)
    shares = _routed(top_k_index, top_k_weights, num_experts).to(found.dtype)
    return torch.einsum("etd,te->td", found, shares)


def _chosen(weight: Tensor, which: Tensor | None) -> Tensor:
    return weight if which is None else weight[which]


def _dbrx_experts(module: Any) -> Function:
    plain = plain_of(module, "forward")

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() or self.training:
            return plain(self, hidden_states, top_k_index, top_k_weights)
        glu = self.mlp
        gate, up, down = (
            weight.view(self.num_experts, self.ffn_hidden_size, self.hidden_size)
            for weight in (glu.w1, glu.v1, glu.w2)
        )

        def run(x: Tensor, which: Tensor | None) -> Tensor:
            inner = glu.activation_fn(x @ _chosen(gate, which).mT) * (x @ _chosen(up, which).mT)
            return inner @ _chosen(down, which)

        flat = hidden_states.reshape(-1, self.hidden_size)
        out = _through_experts(flat, top_k_index, top_k_weights, self.num_experts, run)
        return out.view(hidden_states.shape)

    return "forward", forward


def _longcat_experts(module: Any) -> Function:
    """Those past the routed ones give a token back as it is."""
    plain = plain_of(module, "forward")

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        count = self.num_routed_experts
        if not torch.compiler.is_compiling() or self.training or count == 0:
            return plain(self, hidden_states, top_k_index, top_k_weights)

        def run(x: Tensor, which: Tensor | None) -> Tensor:
            gate, up = (x @ _chosen(self.gate_up_proj[:count], which).mT).chunk(2, dim=-1)
            return (self.act_fn(gate) * up) @ _chosen(self.down_proj, which).mT

        routed = top_k_index < count
        shares = top_k_weights.masked_fill(~routed, 0)
        out = _through_experts(hidden_states, top_k_index.clamp(max=count - 1), shares, count, run)
        kept = top_k_weights.masked_fill(routed, 0).sum(-1, keepdim=True)
        return (out + hidden_states * kept).to(hidden_states.dtype)

    return "forward", forward


# ------------------------------------------------------------------------------------------------ shared keys
def _shared_keys(module: Any) -> Function | None:
    """Layers that attend over another layer's pools, which transformers 5.17 takes through ``Tensor.to``:
    behind it compiled code no longer knows them, so that they are handed on beside."""
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


# ----------------------------------------------------------------------------------------------------- models
def _records(config: Any, options: dict[str, Any]) -> bool:
    """Whether transformers' decorators are to collect what the layers give, which ours does not."""
    names = ("output_attentions", "output_hidden_states")
    return any(options.get(name) or getattr(config, name, False) for name in names)


def _ctrl(module: Any) -> Function:
    """Multiplies embeddings by numpy's square root, which Dynamo can't follow."""
    plain = plain_of(module, "forward")

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> Any:
        traced = torch.compiler.is_compiling() and past_key_values is not None and not self.training
        known = input_ids is not None and position_ids is not None and token_type_ids is None
        if not traced or not known or _records(self.config, options):
            return plain(
                self,
                input_ids=input_ids,
                past_key_values=past_key_values,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **options,
            )
        embeds = self.w(input_ids)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        places = self.pos_encoding.to(device=embeds.device, dtype=embeds.dtype)[position_ids]
        states = embeds * math.sqrt(self.d_model_size) + places
        for layer in self.h:
            states = layer(states, layer_past=past_key_values, attention_mask=mask, **options)
        return BaseModelOutputWithPast(
            last_hidden_state=self.layernorm(states), past_key_values=past_key_values
        )

    return "forward", forward


class _Lent(Cache):
    """A cache as transformers 5.17's RecurrentGemma may change it: it binds methods to what it is given, so
    that the first attention layer tells the length. Here it does so without."""

    def __init__(self, cache: Any, first: int) -> None:
        self.cache, self.layers, self.first = cache, cache.layers, first

    def update(self, *args: Any, **options: Any) -> Any:
        """Of the cache that it stands for."""
        return self.cache.update(*args, **options)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Of the first attention layer."""
        return self.layers[self.first].get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> Any:
        """Of the first attention layer."""
        return self.layers[self.first].get_mask_sizes(query_length)


def _recurrent_gemma(module: Any) -> Function | None:
    """Binds methods to its cache in transformers 5.17, which Dynamo can't follow; in 5.23 it does not."""
    if not hasattr(sys.modules[type(module).__module__], "_get_mask_sizes"):
        return None
    plain, first = plain_of(module, "forward"), module.config.layers_block_type.index("attention")

    def forward(self: Any, input_ids: Tensor | None = None, **options: Any) -> Any:
        cache, positions = options.get("past_key_values"), options.get("position_ids")
        if not any(isinstance(layer, PagedLayer) for layer in getattr(cache, "layers", ())):
            return plain(self, input_ids, **options)
        options["past_key_values"] = lent = _Lent(cache, first)
        known = {"past_key_values", "position_ids", "attention_mask", "use_cache"}
        traced = torch.compiler.is_compiling() and input_ids is not None and positions is not None
        given = {name for name, value in options.items() if value is not None}
        if not traced or given - known or _records(self.config, options):
            return plain(self, input_ids, **options)
        use_cache = options.get("use_cache")
        use_cache = self.config.use_cache if use_cache is None else use_cache
        states = self.embed_tokens(input_ids)
        mask = create_sliding_window_causal_mask(
            config=self.config,
            inputs_embeds=states,
            attention_mask=options.get("attention_mask"),
            past_key_values=lent,
            position_ids=positions,
        )
        states = states * self.normalizer.type(states.dtype)
        for layer in self.layers:
            states = layer(states, positions, mask, use_cache, lent)
        return BaseModelOutput(last_hidden_state=self.final_norm(states))

    return "forward", forward


def _kept(place: Tensor | None, state: Tensor | None) -> Tensor | None:
    """``state`` in the place that it has for good: captured graphs read and write it there. The first one of
    its shape gets its place outside of compiled code."""
    if state is None:
        return None
    known = place is not None and getattr(place, "_torchpaged_kept", False)
    if place is not None and known and (place.shape, place.dtype) == (state.shape, state.dtype):
        return place.copy_(state)
    if torch.compiler.is_compiling():
        return state.contiguous()
    with torch.inference_mode(False):  # an inference tensor could not be written under no_grad later
        made = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    made._torchpaged_kept = True  # type: ignore[attr-defined]
    torch._dynamo.mark_static_address(made, guard=False)
    return made.copy_(state)


def _recurrent_block(module: Any) -> Function:
    """Keeps what a step gives as its state: another layout behind a prompt than behind a token, and so
    compiled twice, and the next step's input in memory that a captured graph owns."""
    plain = plain_of(module, "forward")

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        conv, recurrent = self.conv1d_state, self.rg_lru.recurrent_states
        out = plain(self, *args, **options)
        self.conv1d_state = _kept(conv, self.conv1d_state)
        self.rg_lru.recurrent_states = _kept(recurrent, self.rg_lru.recurrent_states)
        return out

    return "forward", forward


def _places_of_ids(module: Any) -> Function:
    """Position embeddings whose table grows with the cache's length, at which transformers 5.17 looks; here a
    position past the table raises."""
    plain = plain_of(module, "forward")

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values_length: Any = 0,
    ) -> Tensor:
        traced = torch.compiler.is_compiling() and isinstance(past_key_values_length, Tensor)
        if not traced:
            return plain(self, input_ids, inputs_embeds, past_key_values_length)
        places = (
            self.create_position_ids_from_inputs_embeds(
                inputs_embeds, past_key_values_length, self.padding_idx
            )
            if input_ids is None
            else self.create_position_ids_from_input_ids(input_ids, self.padding_idx, past_key_values_length)
        )
        rows: Tensor = self.weights.index_select(0, places.flatten())
        return rows.view(*places.shape, -1).detach()

    return "forward", forward


#: Class of a module -> what makes its function, or None where the module needs none.
TRACEABLE: dict[str, Callable[[nn.Module], Function | None]] = {
    "CTRLModel": _ctrl,
    "DbrxExperts": _dbrx_experts,
    "Gemma3nTextAttention": _shared_keys,
    "Gemma4TextAttention": _shared_keys,
    "Gemma4UnifiedTextAttention": _shared_keys,
    "LongcatFlashExperts": _longcat_experts,
    "M2M100SinusoidalPositionalEmbedding": _places_of_ids,
    "RecurrentGemmaModel": _recurrent_gemma,
    "RecurrentGemmaRecurrentBlock": _recurrent_block,
}


def traceable_functions(model: PreTrainedModel) -> dict[nn.Module, Function]:
    """The functions for `torchpaged.hf.own_attention` to put in, by module."""
    made = {
        module: TRACEABLE[type(module).__name__](module)
        for module in model.modules()
        if type(module).__name__ in TRACEABLE
    }
    return {module: function for module, function in made.items() if function is not None}
