"""Gated delta nets over the states of a paged cache: those of Qwen3-Next, Qwen3.5, Lara mini and OLMo
hybrid.

The modules' fields are not public; ``tests/engine/test_states.py`` runs every class under each supported
transformers.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from torchpaged.custom_ops.plain_torch import exact
from torchpaged.hf.families import Family, register_family
from torchpaged.hf.packed_mixers import packed_functions, state_of, state_of_attached


def _forward(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    layer = state_of(self, options)
    if layer is None:
        plain: Tensor = type(self).forward(self, hidden_states, **options)
        return plain
    mixed, gate, b, a = _projected(self, hidden_states)
    mixed = layer.convolve(mixed, self.conv1d, self.activation)
    q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
    beta = b.sigmoid() * (2.0 if getattr(self, "allow_neg_eigval", False) else 1.0)
    out = layer.attend(
        q.unflatten(-1, (-1, self.head_k_dim)),
        k.unflatten(-1, (-1, self.head_k_dim)),
        v.unflatten(-1, (-1, self.head_v_dim)),
        -exact(self.A_log).exp() * softplus(exact(a) + self.dt_bias),
        beta,
        scale=self.head_k_dim**-0.5,
        delta_rule=True,
    )
    is_olmo = hasattr(self, "o_norm")
    norm, project = (self.o_norm, self.o_proj) if is_olmo else (self.norm, self.out_proj)
    layer.complete()
    normed = norm(out.flatten(0, 2), gate.reshape(-1, self.head_v_dim))
    projected: Tensor = project(normed.view(*hidden_states.shape[:2], -1))
    return projected


def _projected(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values side by side, the output's gate, and what beta and the decay are made of;
    ``[batch, query_len, *]``."""
    if hasattr(self, "in_proj_qkvz"):  # Qwen3-Next
        q, k, v, gate, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
        return torch.cat([y.flatten(2) for y in (q, k, v)], dim=-1), gate.flatten(2), b, a
    if hasattr(self, "in_proj_qkv"):  # Qwen3.5
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
    mixed = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)
    return mixed, self.g_proj(x), self.b_proj(x), self.a_proj(x)


_CLASSES = (
    "LaraMiniGatedDeltaNet",
    "OlmoHybridGatedDeltaNet",
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
)
register_family(
    Family(
        ("lara_mini", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        packed=dict.fromkeys(_CLASSES, _forward),
        functions=packed_functions,
        layer=state_of_attached,
    )
)
