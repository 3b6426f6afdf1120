"""Fused layers that keep a state per request: gated delta nets (Qwen3-Next, Qwen3.5), Kimi delta attention,
gated short convolutions (LFM2) and Mamba 2 (Bamba, Granite 4, Nemotron-H, Falcon-H1, Zamba 2).

A step of a delta net: linear (norm, all projections of the layer's input), causal_conv, delta_gates,
linear_attention, gated_rms_norm, linear (output, residual), and the MLP; Mamba 2 has the same. Of a short
convolution: linear (norm, gates and input), causal_conv with its gates, linear (output, residual), and the
MLP. What surrounds the mixer is `LayerPlan`'s, the state `torchpaged.hf.packed_state.PackedState`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from torchpaged.custom_ops import BackendOps
from torchpaged.fuse.fusible import norm_of
from torchpaged.fuse.mixers import MixerPlan, Step, linear, normed
from torchpaged.hf.packed_mixers import packed_state
from torchpaged.hf.packed_state import PackedState, exact


class StatePlan(MixerPlan):
    """What the fused forward of a layer with a state uses; see `MixerPlan`."""

    #: The depthwise convolution, by its name in the mixer.
    conv_name = "conv1d"

    def plan(self) -> None:
        """See `MixerPlan`."""
        self.conv = getattr(self.mixer, self.conv_name)

    def look_up(self) -> None:
        """See `MixerPlan`."""
        norm = getattr(self.mixer, "o_norm", getattr(self.mixer, "norm", None))
        if hasattr(norm, "weight"):
            self.norm_weight, self.norm_eps, _ = norm_of(norm, 0.0)

    def cached(self, cache: Any) -> PackedState | None:
        """See `MixerPlan`; None where the state is transformers' own."""
        return packed_state(cache, self.layer_idx)

    def begin(self, cached: Any, hidden_states: Tensor) -> BackendOps:
        """See `MixerPlan`."""
        channels, _, width = self.conv.weight.shape
        ops: BackendOps = cached.prepared(hidden_states, width, channels)
        return ops

    def gates(
        self, step: Step, a: Tensor, b: Tensor | None, a_log: Tensor, dt_bias: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Decay and beta ``[batch, query_len, num_heads]`` by the op ``delta_gates``."""
        exact = torch.float64 if a.dtype == torch.float64 else torch.float32
        g, beta = (a.new_empty(a.shape[0], a.shape[1] * a.shape[2], dtype=exact) for _ in range(2))
        step.ops.delta_gates(a, b, a_log, dt_bias, g, beta, **options)
        return g.unflatten(0, step.shape), beta.unflatten(0, step.shape)

    def normed(self, step: Step, x: Tensor, gate: Tensor, **options: Any) -> Tensor:
        """The gated norm of the mixer over ``x [T, heads, width]``, ``[T, heads * width]``."""
        out, weight = torch.empty_like(x), self.norm_weight
        if weight.shape[0] != x.shape[2]:  # one for each head
            weight = weight.view(x.shape[1:])
        step.ops.gated_rms_norm(x, gate, weight, out, eps=self.norm_eps, **options)
        return out.flatten(1)


class ShortConvPlan(StatePlan):
    """Of a gated short convolution."""

    conv_name = "conv"

    def mix(self, step: Step, parts: Sequence[Tensor]) -> Tensor:
        """See `MixerPlan`."""
        (whole,) = parts
        b, c, x = whole.unflatten(0, step.shape).chunk(3, dim=-1)
        mixed: Tensor = step.cached.convolve(x, self.conv, gates=(b, c))
        return mixed.flatten(0, 1)


class DeltaNetPlan(StatePlan):
    """Of a gated delta net."""

    def plan(self) -> None:
        """See `MixerPlan`."""
        super().plan()
        self.order = self._order() if len(self.projections) == 2 else None
        if self.order is None:
            self.joined = len(self.projections) - 3  # q, k and v are apart in OLMo hybrid

    def _order(self) -> Tensor:
        """Of a product in groups, one for each key head with its query, key, values, and their gates: the
        columns of all queries, keys and values one after the other, as the convolution has them."""
        mixer = self.mixer
        num_heads, weight = mixer.num_k_heads, self.projections[0].weight
        columns = torch.arange(weight.shape[0], device=weight.device).view(num_heads, -1)
        values = mixer.value_dim // num_heads
        parts = columns.split([mixer.head_k_dim, mixer.head_k_dim, values, values], dim=1)
        order = torch.cat([part.flatten() for part in parts[:3]])
        torch._dynamo.mark_static_address(order, guard=False)  # else compiled CUDA graphs would copy it
        return order

    def look_up(self) -> None:
        """See `MixerPlan`."""
        super().look_up()
        if self.order is not None and self.order.device != self.conv.weight.device:
            self.order = self._order()

    def ordered(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of what was projected: queries, keys and values side by side ``[T, channels]``; the output's gate,
        what beta and what the decay is made of, ``[T, groups, *]`` each."""
        if self.order is None:
            whole, gate, b, a = parts
            return whole, gate[:, None], b[:, None], a[:, None]
        qkvz, ba = parts
        groups, values = self.mixer.num_k_heads, self.mixer.value_dim
        b, a = ba.unflatten(-1, (groups, -1)).chunk(2, dim=-1)
        gate = qkvz.unflatten(-1, (groups, -1))[..., -(values // groups) :]
        return qkvz.index_select(1, self.order), gate, b, a

    def mix(self, step: Step, parts: Sequence[Tensor]) -> Tensor:
        """See `MixerPlan`."""
        mixer, cached = self.mixer, step.cached
        mixed, gate, b, a = self.ordered(parts)
        mixed = cached.convolve(mixed.unflatten(0, step.shape), self.conv, mixer.activation)
        q, k, v = mixed.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        scale = 2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0
        g, beta = self.gates(step, a, b, mixer.A_log, mixer.dt_bias, beta_scale=scale)
        out = cached.attend(
            q.unflatten(-1, (-1, mixer.head_k_dim)),
            k.unflatten(-1, (-1, mixer.head_k_dim)),
            v.unflatten(-1, (-1, mixer.head_v_dim)),
            g,
            beta,
            scale=mixer.head_k_dim**-0.5,
            delta_rule=True,
        )
        return self.normed(step, out.flatten(0, 1), gate)


class KimiDeltaPlan(StatePlan):
    """Of Kimi delta attention: keys' columns decay one by one; Kimi Linear's gates come out of narrow
    products."""

    joined = 3

    def mix(self, step: Step, parts: Sequence[Tensor]) -> Tensor:
        """See `MixerPlan`."""
        mixer, ops, cached, width = self.mixer, step.ops, step.cached, self.mixer.head_dim
        mixed, f, b, gate = parts
        mixed = cached.convolve(mixed.unflatten(0, step.shape), self.conv, mixer.activation)
        q, k, v = (x.unflatten(-1, (-1, width)) for x in mixed.chunk(3, dim=-1))
        g, beta = self.decay(step, f), b.sigmoid().unflatten(0, step.shape)
        out = cached.attend(q, k, v, g, beta, scale=width**-0.5, delta_rule=True)
        # gated_rms_norm has silu gates; this one is a sigmoid
        out = normed(ops, out.reshape(-1, width), mixer.o_norm).view(f.shape[0], -1)
        gate = linear(ops, gate, mixer.g_b_proj) if hasattr(mixer, "g_b_proj") else gate
        return out * gate.sigmoid()

    def decay(self, step: Step, f: Tensor) -> Tensor:
        """Of each column of the keys, ``[batch, query_len, num_heads, head_dim]``."""
        forget, width = self.mixer.forget_gate, self.mixer.head_dim
        f = linear(step.ops, f, forget.f_b_proj) if hasattr(forget, "f_b_proj") else f
        if getattr(forget, "safe_gate", False):  # Bailing hybrid's, which is bounded
            g = forget.A_log.exp()[:, None] * exact(f).add(forget.dt_bias).unflatten(-1, (-1, width))
            return g.sigmoid_().mul_(forget.lower_bound).unflatten(0, step.shape)
        # the op's heads are columns
        a_log = forget.A_log.view(-1, 1).expand(-1, width).reshape(-1)
        g, _ = self.gates(step, f[:, None], None, a_log, forget.dt_bias)
        return g.unflatten(-1, (-1, width))


class Mamba2Plan(StatePlan):
    """Of a Mamba 2 mixer."""

    def mix(self, step: Step, parts: Sequence[Tensor]) -> Tensor:
        """See `MixerPlan`."""
        mixer, cached = self.mixer, step.cached
        groups, (low, high) = mixer.n_groups, mixer.time_step_limit
        (whole,) = parts
        gate, mixed, dt = whole.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
        mixed = cached.convolve(mixed.unflatten(0, step.shape), self.conv, mixer.activation)
        width = mixer.ssm_state_size
        v, k, q = mixed.split([mixer.intermediate_size, groups * width, groups * width], dim=-1)
        v, k, q = (each.unflatten(-1, (-1, n)) for each, n in ((v, mixer.head_dim), (k, width), (q, width)))
        limits = {"min_step": low, "max_step": None if high == inf else high}
        g, beta = self.gates(step, dt[:, None], None, mixer.A_log, mixer.dt_bias, **limits)
        out = cached.attend(q, k, v, g, beta, scale=1.0, delta_rule=False).flatten(0, 1)
        skip, norm = v.flatten(0, 1), mixer.norm
        if isinstance(norm, nn.Identity):
            return torch.addcmul(out, skip, mixer.D[:, None].to(out.dtype)).flatten(1) * silu(gate)
        # one group where the norm has no size of them: Bamba and Granite 4 in transformers 5.17
        size = getattr(norm, "group_size", mixer.intermediate_size // getattr(norm, "n_groups", 1))
        gate_first = not getattr(norm, "norm_before_gate", False)
        options = {"gate_first": gate_first, "skip": skip, "skip_weight": mixer.D}
        return self.normed(step, out.view(out.shape[0], -1, size), gate[:, None], **options)


#: What mixes tokens -> what its layers' plan is.
STATE_PLANS: dict[str, type[StatePlan]] = {
    "ShortConv": ShortConvPlan,
    "GatedDeltaNet": DeltaNetPlan,
    "DeltaAttention": KimiDeltaPlan,
    **dict.fromkeys(("Mixer", "MambaLayer", "Mamba2Mixer", "MambaMixer"), Mamba2Plan),
}
