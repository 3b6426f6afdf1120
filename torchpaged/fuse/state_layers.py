"""Fused layers that keep a state per request: gated delta nets (Qwen3-Next, Qwen3.5) and gated short
convolutions (LFM2).

A step of a delta net: linear (norm, all projections of the layer's input), causal_conv, delta_gates,
linear_attention, gated_rms_norm, linear (output, residual), and the MLP; of a short convolution: linear
(norm, gates and input), causal_conv with its gates, linear (output, residual), and the MLP. What surrounds
the mixer is `LayerPlan`'s, the state `torchpaged.hf.packed_state.PackedState`'s.
"""

from __future__ import annotations

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

    def cached(self, cache: Any) -> PackedState | None:
        """See `LayerPlan`; None where the state is transformers' own."""
        return packed_state(cache, self.layer_idx)

    def begin(self, cached: Any, hidden_states: Tensor) -> BackendOps:
        """See `LayerPlan`."""
        channels, _, width = self.conv.weight.shape
        ops: BackendOps = cached.prepared(hidden_states, width, channels)
        return ops


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
            mixed, *others = projected
            gate, b, a = (each[:, None] for each in others)
            return mixed, gate, b, a
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
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        g, beta = (x.new_empty(x.shape[0], mixer.num_v_heads, dtype=exact) for _ in range(2))
        step.ops.delta_gates(a, b, mixer.A_log, mixer.dt_bias, g, beta)
        out = cached.attend(
            q.unflatten(-1, (-1, mixer.head_k_dim)),
            k.unflatten(-1, (-1, mixer.head_k_dim)),
            v.unflatten(-1, (-1, mixer.head_v_dim)),
            g.unflatten(0, step.shape),
            beta.unflatten(0, step.shape),
            scale=mixer.head_k_dim**-0.5,
            delta_rule=True,
        ).flatten(0, 1)
        normed = torch.empty_like(out)
        weight, eps, _ = norm_of(mixer.norm, 0.0)
        step.ops.gated_rms_norm(out, gate, weight, normed, eps=eps)
        return normed.flatten(1)


#: What mixes tokens -> what its layers' plan is.
STATE_PLANS: dict[str, type[StatePlan]] = {"ShortConv": ShortConvPlan, "GatedDeltaNet": DeltaNetPlan}
