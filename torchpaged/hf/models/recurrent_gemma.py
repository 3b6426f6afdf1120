"""RecurrentGemma: its RG-LRU over the states of a paged cache. A channel is a head with a state of one
number, h = a h + sqrt(1 - a^2) i x, and the op's decay is the logarithm of a.

transformers keeps these states in the modules, which beams, chunks of a prompt and padding do not reach; in
5.17 it binds methods to its cache, which Dynamo can't follow.

Source: De, Smith and others, "Griffin" (arXiv:2402.19427), section 2.4. The modules' names and fields are not
public; ``tests/hf/test_traceable.py`` compares each with what it replaces under each supported transformers,
and ``tests/engine/test_states.py`` runs the class.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutput

from torchpaged.custom_ops.state.channels import lru_decays
from torchpaged.hf.attached import plain_of, was_given_functions
from torchpaged.hf.families import Family, Function, register_family
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.packed_mixers import packed_functions, state_of
from torchpaged.hf.packed_state import PackedState
from torchpaged.hf.state_layer import StateLayer
from torchpaged.hf.support import records_layers


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
        if not traced or given - known or records_layers(self.config, options):
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
    its shape gets its place outside of compiled code. A place is marked: the module's own code puts other
    tensors into the same field."""
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


def _gate(blocks: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``[tokens, blocks, width]`` of ``blocks [blocks, tokens, width]``, with a ``weight [blocks, width,
    width]`` each."""
    return torch.baddbmm(bias[:, None], blocks, weight).transpose(0, 1).sigmoid()


def _forward(
    self: Any, input_states: Tensor, position_ids: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    """Of a recurrent block. With any other cache its class's, whose states are kept where they are: behind a
    prompt they have another layout than behind a token, so that steps would be compiled twice, and lie in
    memory that a captured graph owns."""
    layer = state_of(self, options)
    if layer is None:
        conv, recurrent = self.conv1d_state, self.rg_lru.recurrent_states
        plain: tuple[Tensor, None] = type(self).forward(self, input_states, position_ids, *args, **options)
        self.conv1d_state = _kept(conv, self.conv1d_state)
        self.rg_lru.recurrent_states = _kept(recurrent, self.rg_lru.recurrent_states)
        return plain
    lru, gate = self.rg_lru, self.act_fn(self.linear_y(input_states))
    x = layer.convolve(self.linear_x(input_states), self.conv_1d)
    if x.device.type == "cpu":
        parameters = {
            "input_weight": lru.input_gate_weight,
            "input_bias": lru.input_gate_bias,
            "recurrent_weight": lru.recurrent_gate_weight,
            "recurrent_bias": lru.recurrent_gate_bias,
            "recurrent_param": lru.recurrent_param,
        }
        h = layer.over_channels("rg_lru", {"x": x, "gate": gate}, 1, parameters)
        layer.complete()
        return self.linear_out(h), None
    blocks = x.reshape(-1, *lru.input_gate_bias.shape).transpose(0, 1)
    recurrent = _gate(blocks, lru.recurrent_gate_weight, lru.recurrent_gate_bias).reshape(x.shape)
    decay, norm = lru_decays(recurrent, lru.recurrent_param, layer.begins(*x.shape[:2]))
    gated = _gate(blocks, lru.input_gate_weight, lru.input_gate_bias).reshape(x.shape)
    v = x * gated * norm.to(x.dtype)
    ones = x.new_ones(*x.shape[:2], 1, 1)
    h = layer.attend(ones, ones, v[..., None], decay, None, scale=1.0, delta_rule=False)
    layer.complete()
    return self.linear_out(h[..., 0] * gate), None


def _layer(owner: PagedOwner, index: int, config: Any, template: Any) -> StateLayer | None:
    """Of a recurrent block, of which transformers 5.17 makes a layer of keys. A cache for a model that is not
    attached has no states: they are the modules'."""
    if config.layers_block_type[index] in ("attention", "sliding_attention"):
        return None
    packed = was_given_functions(config) and not owner.dense
    return PackedState(owner, index) if packed else StateLayer()


register_family(
    Family(
        ("recurrent_gemma",),
        modules={"RecurrentGemmaModel": _recurrent_gemma},
        packed={"RecurrentGemmaRecurrentBlock": _forward},
        functions=packed_functions,
        layer=_layer,
    )
)
