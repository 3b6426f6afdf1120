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
from torchpaged.fuse.layers import LayerPlan
from torchpaged.fuse.stacked import Stacked
from torchpaged.hf.packed_mixers import packed_state
from torchpaged.hf.packed_state import PackedState


class StatePlan(LayerPlan):
    """What the fused forward of a layer with a state uses; see `LayerPlan`."""

    conv: Any  # the depthwise convolution

    def _plan_mixer(self) -> None:
        self.projections = [getattr(self.mixer, name) for name in self.architecture.projections(self.layer)]
        self.inputs = Stacked(self.projections) if "qkv" in self.passes else None

    def _look_up_mixer(self) -> None:
        pass

    def cached(self, cache: Any) -> PackedState | None:
        """See `LayerPlan`; None where the state is transformers' own."""
        return packed_state(cache, self.layer_idx)

    def begin(self, cached: Any, hidden_states: Tensor) -> BackendOps:
        """See `LayerPlan`."""
        channels, _, width = self.conv.weight.shape
        ops: BackendOps = cached.prepared(hidden_states, width, channels)
        return ops

    def project(self, ops: BackendOps, x: Tensor) -> Tensor:
        """All projections of the layer's input, side by side: ``[T, *]``."""
        x, options = self.before(ops, x, 0, self.inputs)
        if self.inputs is None:
            return torch.cat([linear(x) for linear in self.projections], dim=-1)
        weight = self.inputs.weight
        return self.linear(ops, x, weight, weight.shape[0], bias=self.inputs.bias, **options)


class ShortConvPlan(StatePlan):
    """Of a gated short convolution."""

    def _plan_mixer(self) -> None:
        super()._plan_mixer()
        self.conv = self.mixer.conv

    def mix(
        self,
        ops: BackendOps,
        x: Tensor,
        cached: PackedState,
        position_ids: Tensor,
        rotary: Any,
        shape: tuple[int, int],
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """See `LayerPlan`."""
        b, c, x = self.project(ops, x).chunk(3, dim=-1)
        x, *gates = (each.unflatten(0, shape) for each in (x, b, c))
        return cached.convolve(x, self.conv, gates=tuple(gates)).flatten(0, 1)


class DeltaNetPlan(StatePlan):
    """Of a gated delta net."""

    def _plan_mixer(self) -> None:
        super()._plan_mixer()
        mixer = self.mixer
        self.conv, self.key_dim, self.value_dim = mixer.conv1d, mixer.key_dim, mixer.value_dim
        self.is_grouped = len(self.projections) == 2
        self.order = self._order() if self.is_grouped else None

    def _order(self) -> Tensor:
        """Of a product in groups, one for each key head with its query, key, values, and their gates: the
        columns of all queries, keys and values one after the other, as the convolution has them."""
        mixer = self.mixer
        num_heads, weight = mixer.num_k_heads, self.projections[0].weight
        columns = torch.arange(weight.shape[0], device=weight.device).view(num_heads, -1)
        values = self.value_dim // num_heads
        parts = columns.split([mixer.head_k_dim, mixer.head_k_dim, values, values], dim=1)
        order = torch.cat([part.flatten() for part in parts[:3]])
        torch._dynamo.mark_static_address(order, guard=False)  # else compiled CUDA graphs would copy it
        return order

    def refresh(self) -> None:
        """See `LayerPlan`."""
        super().refresh()
        if self.order is not None and self.order.device != self.conv.weight.device:
            self.order = self._order()

    def split(self, whole: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the product: queries, keys and values side by side ``[T, channels]``; the output's gate, what
        beta and what the decay is made of, ``[T, groups, *]`` each."""
        channels, num_heads = self.conv.weight.shape[0], self.mixer.num_v_heads
        if self.order is None:
            widths = [channels, self.value_dim, num_heads, num_heads]
            mixed, gate, b, a = whole.split(widths, dim=-1)
            return mixed, gate[:, None], b[:, None], a[:, None]
        groups = self.mixer.num_k_heads
        qkvz, ba = whole.split([whole.shape[1] - 2 * num_heads, 2 * num_heads], dim=-1)
        gate = qkvz.unflatten(-1, (groups, -1))[..., -(self.value_dim // groups) :]
        b, a = ba.unflatten(-1, (groups, -1)).chunk(2, dim=-1)
        return whole.index_select(1, self.order), gate, b, a

    def mix(
        self,
        ops: BackendOps,
        x: Tensor,
        cached: PackedState,
        position_ids: Tensor,
        rotary: Any,
        shape: tuple[int, int],
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """See `LayerPlan`."""
        mixer = self.mixer
        mixed, gate, b, a = self.split(self.project(ops, x))
        mixed = cached.convolve(mixed.unflatten(0, shape), self.conv, mixer.activation)
        q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        g, beta = (x.new_empty(x.shape[0], mixer.num_v_heads, dtype=exact) for _ in range(2))
        ops.delta_gates(a, b, mixer.A_log, mixer.dt_bias, g, beta)
        out = cached.attend(
            q.unflatten(-1, (-1, mixer.head_k_dim)),
            k.unflatten(-1, (-1, mixer.head_k_dim)),
            v.unflatten(-1, (-1, mixer.head_v_dim)),
            g.unflatten(0, shape),
            beta.unflatten(0, shape),
            scale=mixer.head_k_dim**-0.5,
            delta_rule=True,
        ).flatten(0, 1)
        normed = torch.empty_like(out)
        weight, eps, _ = norm_of(mixer.norm, 0.0)
        ops.gated_rms_norm(out, gate, weight, normed, eps=eps)
        return normed.flatten(1)


#: What mixes tokens -> what its layers' plan is.
STATE_PLANS: dict[str, type[StatePlan]] = {"ShortConv": ShortConvPlan, "GatedDeltaNet": DeltaNetPlan}
