"""Mixers that keep a state per request, over the states of a paged cache: one function for each kind.

The modules' fields are not public; ``tests/engine/test_states.py`` runs every class under each supported
transformers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Identity
from torch.nn.functional import linear, silu, softplus

from torchpaged.custom_ops.plain_torch import exact
from torchpaged.custom_ops.state.channels import scan_results, scan_steps
from torchpaged.hf.families import Family, family_of, register_family
from torchpaged.hf.models import latent  # noqa: F401  the family that is asked for below
from torchpaged.hf.packed_mixers import over_states, packed_functions, state_of_attached
from torchpaged.hf.packed_state import PackedState

_LATENT = family_of("deepseek_v3")


@over_states
def short_conv(self: Any, layer: PackedState, hidden_states: Tensor) -> Tensor:
    """Gated short convolutions: LFM2's."""
    b, c, x = self.in_proj(hidden_states).chunk(3, dim=-1)
    mixed = layer.convolve(x, self.conv, gates=(b, c))
    layer.complete()
    projected: Tensor = self.out_proj(mixed)
    return projected


@over_states
def gated_delta_net(self: Any, layer: PackedState, hidden_states: Tensor) -> Tensor:
    """Those of Qwen3-Next, Qwen3.5, Lara mini and OLMo hybrid."""
    mixed, gate, b, a = _projected(self, hidden_states)
    mixed = layer.convolve(mixed, self.conv1d, self.activation)
    q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
    beta = b.sigmoid() * (2.0 if getattr(self, "allow_neg_eigval", False) else 1.0)
    q, k = (x.unflatten(-1, (-1, self.head_k_dim)) for x in (q, k))
    v = v.unflatten(-1, (-1, self.head_v_dim))
    g = -exact(self.A_log).exp() * softplus(exact(a) + self.dt_bias)
    out = layer.attend(q, k, v, g, beta, scale=self.head_k_dim**-0.5, delta_rule=True)
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


@over_states
def mamba2(self: Any, layer: PackedState, hidden_states: Tensor) -> Tensor:
    """Those of Bamba, Granite 4, Nemotron-H, Falcon-H1, Zamba 2 and Mamba 2 itself."""
    sizes = [self.intermediate_size, self.conv_dim, self.num_heads]
    if hasattr(self, "mup_vector"):  # Falcon-H1
        whole = self.in_proj(hidden_states * self.ssm_in_multiplier) * self.mup_vector
    else:
        whole = self.in_proj(hidden_states)
    gate, mixed, dt = whole.split(sizes, dim=-1)
    mixed = layer.convolve(mixed, self.conv1d, self.activation)
    groups = self.n_groups * self.ssm_state_size
    x, b, c = mixed.split([self.intermediate_size, groups, groups], dim=-1)
    x = x.unflatten(-1, (self.num_heads, self.head_dim))
    # As prompts have it in transformers, whose single tokens are not clamped.
    dt = exact(softplus(dt + self.dt_bias).clamp(*self.time_step_limit))
    q, k = (x.unflatten(-1, (self.n_groups, self.ssm_state_size)) for x in (c, b))
    out = layer.attend(q, k, x, -exact(self.A_log).exp() * dt, dt, scale=1.0, delta_rule=False)
    layer.complete()
    out, gate = (exact(out) + self.D[:, None] * exact(x)).flatten(2).flatten(0, 1), gate.flatten(0, 1)
    gated = out * silu(gate) if isinstance(self.norm, Identity) else self.norm(out, gate)
    projected: Tensor = self.out_proj(gated.to(hidden_states.dtype).view(*hidden_states.shape[:2], -1))
    return projected


@over_states
def mamba1(self: Any, layer: PackedState, hidden_states: Tensor) -> Tensor:
    """Those of Jamba, Mamba and Falcon Mamba. A channel is a head of one value column, and each number of its
    state has a decay.

    Source: Gu, Dao, "Mamba" (arXiv:2312.00752), algorithm 2.
    """
    x, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
    x = layer.convolve(x, self.conv1d, self.activation)
    sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
    dt, b, c = self.x_proj(x).split(sizes, dim=-1)
    if hasattr(self, "dt_layernorm"):  # Jamba's
        dt, b, c = self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)
    # A quantised projection has a product of its own, and the scan adds the bias.
    is_quantised = hasattr(self.config, "_is_quantized")
    dt = self.dt_proj(dt) - self.dt_proj.bias if is_quantised else linear(dt, self.dt_proj.weight)
    if x.device.type == "cpu":
        tokens = {"x": x, "dt": dt, "b": b, "c": c, "gate": gate}
        parameters = {"a_log": self.A_log, "dt_bias": self.dt_proj.bias, "skip_weight": self.D}
        out = layer.over_channels("selective_scan", tokens, self.ssm_state_size, parameters)
        layer.complete()
        scanned: Tensor = self.out_proj(out)
        return scanned
    step, g = scan_steps(dt, self.dt_proj.bias, self.A_log)
    q, k = c[:, :, None], b[:, :, None]
    out = layer.attend(q, k, x[..., None], g, step, scale=1.0, delta_rule=False)
    layer.complete()
    y = scan_results(out[..., 0], x, self.D, gate)
    projected: Tensor = self.out_proj(y.to(hidden_states.dtype))
    return projected


@over_states
def kimi_delta(self: Any, layer: PackedState, hidden_states: Tensor) -> Tensor:
    """Kimi delta attention, whose keys' columns decay one by one: Kimi Linear and Bailing hybrid."""
    mixed = torch.cat([project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
    mixed = layer.convolve(mixed, self.conv1d, self.activation)
    q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in mixed.chunk(3, dim=-1))
    g, beta = self.forget_gate(hidden_states), self.b_proj(hidden_states).sigmoid()
    out = layer.attend(q, k, v, g, beta, scale=self.head_dim**-0.5, delta_rule=True)
    layer.complete()
    is_bailing = hasattr(self, "g_proj")
    gate = self.g_proj(hidden_states) if is_bailing else self.g_b_proj(self.g_a_proj(hidden_states))
    projected: Tensor = self.o_proj(self.o_norm(out, gate.view(out.shape)).flatten(2))
    return projected


def _functions_with_latents(model: Any) -> dict[Any, Any]:
    """Those of latents and those of states; none where one of the two is not to be had, so that a model's
    caches are of one kind."""
    latents, states = _LATENT.functions(model), packed_functions(model)
    return {**latents, **states} if latents and states else {}


def _layer_with_latents(owner: Any, index: int, config: Any, template: Any) -> Any:
    made = _LATENT.layer(owner, index, config, template)
    return state_of_attached(owner, index, config, template) if made is None else made


def _register(types: str, classes: str, forward: Callable[..., Any]) -> None:
    packed = dict.fromkeys(classes.split(), forward)
    family = Family(tuple(types.split()), packed=packed, functions=packed_functions, layer=state_of_attached)
    register_family(family)


_register("lfm2 lfm2_moe lfm3", "Lfm2MoeShortConv Lfm2ShortConv Lfm3ShortConv", short_conv)
_register(
    "lara_mini olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next",
    "LaraMiniGatedDeltaNet OlmoHybridGatedDeltaNet Qwen3NextGatedDeltaNet Qwen3_5GatedDeltaNet "
    "Qwen3_5MoeGatedDeltaNet",
    gated_delta_net,
)
_register(
    "bamba falcon_h1 granitemoehybrid nemotron_h zamba2",
    "BambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer NemotronHMamba2Mixer Zamba2MambaMixer",
    mamba2,
)
_register("jamba", "JambaMambaMixer", mamba1)
register_family(
    dataclasses.replace(
        _LATENT,
        types=("bailing_hybrid", "kimi_linear"),
        packed=dict.fromkeys(("BailingHybridDeltaAttention", "KimiLinearDeltaAttention"), kimi_delta),
        functions=_functions_with_latents,
        layer=_layer_with_latents,
    )
)
