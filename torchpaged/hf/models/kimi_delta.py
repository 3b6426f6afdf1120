"""Kimi delta attention, whose keys' columns decay one by one, over the states of a paged cache, with latent
attention in the other layers: Kimi Linear and Bailing hybrid.

The modules' fields are not public; ``tests/engine/test_states.py`` runs every class under each supported
transformers.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from torchpaged.hf.families import family_of, register_family
from torchpaged.hf.models import latent  # noqa: F401  the family that is asked for below
from torchpaged.hf.packed_mixers import packed_functions, state_of, state_of_attached

_LATENT = family_of("deepseek_v3")


def _forward(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    layer = state_of(self, options)
    if layer is None:
        plain: Tensor = type(self).forward(self, hidden_states, **options)
        return plain
    mixed = torch.cat([project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
    mixed = layer.convolve(mixed, self.conv1d, self.activation)
    q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in mixed.chunk(3, dim=-1))
    out = layer.attend(
        q,
        k,
        v,
        self.forget_gate(hidden_states),
        self.b_proj(hidden_states).sigmoid(),
        scale=self.head_dim**-0.5,
        delta_rule=True,
    )
    layer.complete()
    is_bailing = hasattr(self, "g_proj")
    gate = self.g_proj(hidden_states) if is_bailing else self.g_b_proj(self.g_a_proj(hidden_states))
    projected: Tensor = self.o_proj(self.o_norm(out, gate.view(out.shape)).flatten(2))
    return projected


def _functions(model: Any) -> dict[Any, Any]:
    """Those of latents and those of states; none where one of the two is not to be had, so that a model's
    caches are of one kind."""
    latents, states = _LATENT.functions(model), packed_functions(model)
    return {**latents, **states} if latents and states else {}


def _layer(owner: Any, index: int, config: Any, template: Any) -> Any:
    made = _LATENT.layer(owner, index, config, template)
    return state_of_attached(owner, index, config, template) if made is None else made


register_family(
    dataclasses.replace(
        _LATENT,
        types=("bailing_hybrid", "kimi_linear"),
        packed=dict.fromkeys(("BailingHybridDeltaAttention", "KimiLinearDeltaAttention"), _forward),
        functions=_functions,
        layer=_layer,
    )
)
