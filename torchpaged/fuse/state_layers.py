"""Fused layers that keep a state per request: gated delta nets (Qwen3-Next, Qwen3.5), gated short
convolutions (LFM2) and Mamba 2 (Bamba, Granite 4, Nemotron-H).

A step of a delta net: linear (norm, all projections of the layer's input), causal_conv, delta_gates,
linear_attention, gated_rms_norm, linear (output, residual), and the MLP; Mamba 2 has the same. Of a short
convolution: linear (norm, gates and input), causal_conv with its gates, linear (output, residual), and the
MLP. What surrounds the mixer is `LayerPlan`'s, the state `torchpaged.hf.packed_state.PackedState`'s.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BackendOps
from torchpaged.fuse.fusible import norm_of
from torchpaged.fuse.layers import LayerPlan, Step
from torchpaged.hf.packed_mixers import packed_state
from torchpaged.hf.packed_state import PackedState


class StatePlan(LayerPlan):
    """What the fused forward of a layer with a state uses; see `LayerPlan`."""

    #: The depthwise convolution, by its name in the mixer.
    conv_name = "conv1d"

    def _plan_mixer(self) -> None:
        self.conv = getattr(self.mixer, self.conv_name)

    def _look_up_mixer(self) -> None:
        norm = getattr(self.mixer, "o_norm", getattr(self.mixer, "norm", None))
        if norm is not None:
            self.norm_weight, self.norm_eps, _ = norm_of(norm, 0.0)

    def cached(self, cache: Any) -> PackedState | None:
        """See `LayerPlan`; None where the state is transformers' own."""
        return packed_state(cache, self.layer_idx)

    def begin(self, cached: Any, hidden_states: Tensor) -> BackendOps:
        """See `LayerPlan`."""
        channels, _, width = self.conv.weight.shape
        ops: BackendOps = cached.prepared(hidden_states, width, channels)
        return ops

    def gates(self, step: Step, a: Tensor, b: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        """Decay and beta ``[batch, query_len, num_heads]`` of ``[T, groups, *]``."""
        exact = torch.float64 if a.dtype == torch.float64 else torch.float32
        g, beta = (a.new_empty(a.shape[0], a.shape[1] * a.shape[2], dtype=exact) for _ in range(2))
        step.ops.delta_gates(a, b, self.mixer.A_log, self.mixer.dt_bias, g, beta, **options)
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

    def mix(self, step: Step, x: Tensor) -> Tensor:
        """See `LayerPlan`."""
        (whole,) = self.project(step, x)
        b, c, x = whole.unflatten(0, step.shape).chunk(3, dim=-1)
        mixed: Tensor = step.cached.convolve(x, self.conv, gates=(b, c))
        return mixed.flatten(0, 1)


class DeltaNetPlan(StatePlan):
    """Of a gated delta net."""

    def _plan_mixer(self) -> None:
        super()._plan_mixer()
        self.order = self._order() if len(self.projections) == 2 else None

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

    def refresh(self) -> None:
        """See `LayerPlan`."""
        super().refresh()
        if self.order is not None and self.order.device != self.conv.weight.device:
            self.order = self._order()

    def parts(self, step: Step, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the layer's input: queries, keys and values side by side ``[T, channels]``; the output's gate,
        what beta and what the decay is made of, ``[T, groups, *]`` each."""
        projected = self.project(step, x)
        if self.order is None:
            *mixed, gate, b, a = projected
            whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=-1)  # apart in OLMo hybrid
            return whole, gate[:, None], b[:, None], a[:, None]
        qkvz, ba = projected
        groups, values = self.mixer.num_k_heads, self.mixer.value_dim
        b, a = ba.unflatten(-1, (groups, -1)).chunk(2, dim=-1)
        gate = qkvz.unflatten(-1, (groups, -1))[..., -(values // groups) :]
        return qkvz.index_select(1, self.order), gate, b, a

    def mix(self, step: Step, x: Tensor) -> Tensor:
        """See `LayerPlan`."""
        mixer, cached = self.mixer, step.cached
        mixed, gate, b, a = self.parts(step, x)
        mixed = cached.convolve(mixed.unflatten(0, step.shape), self.conv, mixer.activation)
        q, k, v = mixed.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        g, beta = self.gates(step, a, b, beta_scale=2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0)
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


class Mamba2Plan(StatePlan):
    """Of a Mamba 2 mixer."""

    def mix(self, step: Step, x: Tensor) -> Tensor:
        """See `LayerPlan`."""
        mixer, cached = self.mixer, step.cached
        groups, (low, high) = mixer.n_groups, mixer.time_step_limit
        (whole,) = self.project(step, x)
        gate, mixed, dt = whole.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
        mixed = cached.convolve(mixed.unflatten(0, step.shape), self.conv, mixer.activation)
        width = mixer.ssm_state_size
        v, k, q = mixed.split([mixer.intermediate_size, groups * width, groups * width], dim=-1)
        v, k, q = (each.unflatten(-1, (-1, n)) for each, n in ((v, mixer.head_dim), (k, width), (q, width)))
        g, beta = self.gates(step, dt[:, None], None, min_step=low, max_step=None if high == inf else high)
        out = cached.attend(q, k, v, g, beta, scale=1.0, delta_rule=False).flatten(0, 1)
        # one group where the norm has no size of them: Bamba and Granite 4 in transformers 5.17
        out = out.view(out.shape[0], -1, getattr(mixer.norm, "group_size", mixer.intermediate_size))
        skip = {"skip": v.flatten(0, 1), "skip_weight": mixer.D}
        return self.normed(step, out, gate[:, None], gate_first=True, **skip)


#: What mixes tokens -> what its layers' plan is.
STATE_PLANS: dict[str, type[StatePlan]] = {
    "ShortConv": ShortConvPlan,
    "GatedDeltaNet": DeltaNetPlan,
    **dict.fromkeys(("Mixer", "MambaLayer", "Mamba2Mixer"), Mamba2Plan),
}
