"""Models whose code Dynamo can't follow, and which compute the same in one graph by a forward of ours,
wherever something is traced: CTRL multiplies embeddings by numpy's square root, the table of M2M100's
positions grows with the cache's length.

The modules' names and fields are not public; ``tests/hf/test_traceable.py`` compares each with what it
replaces under each supported transformers, and notices one that needs it no more."""

import math
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from torchpaged.hf.attached import plain_of
from torchpaged.hf.cache_argument import CACHE, CACHE_NAMES, cache_of
from torchpaged.hf.families import Family, Function, register_family
from torchpaged.hf.support import records_layers


def _places_of_ids(module: Any) -> Function:
    """Position embeddings whose table grows with the cache's length, at which transformers 5.17 looks; here a
    position past the table raises."""
    plain = plain_of(module, "forward")

    def forward(
        self: Any, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, past_length: Any = 0
    ) -> Tensor:
        traced = torch.compiler.is_compiling() and isinstance(past_length, Tensor)
        if not traced:
            return plain(self, input_ids, inputs_embeds, past_length)
        places = (
            self.create_position_ids_from_inputs_embeds(inputs_embeds, past_length, self.padding_idx)
            if input_ids is None
            else self.create_position_ids_from_input_ids(input_ids, self.padding_idx, past_length)
        )
        rows: Tensor = self.weights.index_select(0, places.flatten())
        return rows.view(*places.shape, -1).detach()

    return "forward", forward


register_family(Family(modules={"M2M100SinusoidalPositionalEmbedding": _places_of_ids}))


#: What CTRL's model takes besides its tokens and its cache.
_NAMES = ("attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "use_cache")


def _ctrl(module: Any) -> Function:
    plain = plain_of(module, "forward")

    def forward(self: Any, input_ids: Tensor | None = None, *args: Any, **options: Any) -> Any:
        cache, given = cache_of(options), {name: options.get(name) for name in _NAMES}
        traced = torch.compiler.is_compiling() and cache is not None and not self.training
        known = input_ids is not None and not args
        known = known and given["position_ids"] is not None and given["token_type_ids"] is None
        if not traced or not known or records_layers(self.config, options):
            return plain(self, input_ids, *args, **options)
        positions, own = given["position_ids"], (*_NAMES, *CACHE_NAMES)
        further = {name: value for name, value in options.items() if name not in own}
        embeds = self.w(input_ids)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embeds,
            attention_mask=given["attention_mask"],
            position_ids=positions,
            **{CACHE: cache},
        )
        places = self.pos_encoding.to(device=embeds.device, dtype=embeds.dtype)[positions]
        states = embeds * math.sqrt(self.d_model_size) + places
        for layer in self.h:
            states = layer(states, layer_past=cache, attention_mask=mask, **further)
        return BaseModelOutputWithPast(last_hidden_state=self.layernorm(states), **{CACHE: cache})

    return "forward", forward


register_family(Family(modules={"CTRLModel": _ctrl}))
