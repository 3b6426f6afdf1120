"""Fused layers that keep a state per request: gated delta nets (Qwen3-Next, Qwen3.5), Kimi delta attention,
gated short convolutions (LFM2) and Mamba 2 (Bamba, Granite 4, Nemotron-H, Falcon-H1, Zamba 2).

A step of a delta net: linear (norm, all projections of the layer's input), causal_conv, delta_gates,
linear_attention, gated_rms_norm, linear (output, residual), and the MLP; the four in the middle are one op,
delta_step, unless tokens may be taken back. Mamba 2 has the same, over single tokens; its mamba2_step leaves
a norm over all heads to the linear behind it, any other to gated_rms_norm. Of a short convolution: linear
(norm, gates and input), causal_conv with its gates, linear (output, residual), and the MLP. What surrounds
the mixer is `LayerPlan`'s, the state `torchpaged.hf.packed_state.PackedState`'s.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.plain_torch import exact_dtype
from torchpaged.fuse.fusible import norm_of
from torchpaged.fuse.mixers import MixerPlan, Step, linear
from torchpaged.hf.packed_mixers import packed_state
from torchpaged.hf.packed_state import PackedState
from torchpaged.metadata import AttentionMetadata


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
        """Decay and beta ``[batch, query_len, num_heads]`` by the op ``delta_gates``; of decays row by row
        ``[batch, query_len, num_heads * key_dim]``."""
        g, beta = (
            x.new_empty(x.shape[0], x.shape[1] * x.shape[2], dtype=exact_dtype(a.dtype))
            for x in (a, b if b is not None else a)
        )
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
        beta_scale = 2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0
        scale, x = mixer.head_k_dim**-0.5, mixed.unflatten(0, step.shape)
        rows = cached.begin(x, self.conv.weight.shape[2], x.shape[2])
        if mixer.activation == "silu" and cached.takes_whole_steps:
            sizes = mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
            given = self.conv, (a, b, mixer.A_log, mixer.dt_bias), gate, self.norm_weight, sizes
            options = {"scale": scale, "beta_scale": beta_scale, "eps": self.norm_eps}
            done: Tensor = cached.delta_step(rows, mixed, *given, **options)
            return done.flatten(1)
        mixed = cached.convolve(x, self.conv, mixer.activation, step=rows)
        q, k, v = mixed.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        g, beta = self.gates(step, a, b, mixer.A_log, mixer.dt_bias, beta_scale=beta_scale)
        q, k = (each.unflatten(-1, (-1, mixer.head_k_dim)) for each in (q, k))
        v = v.unflatten(-1, (-1, mixer.head_v_dim))
        out = cached.attend(q, k, v, g, beta, scale=scale, delta_rule=True)
        return self.normed(step, out.flatten(0, 1), gate)


class KimiDeltaPlan(StatePlan):
    """Of Kimi delta attention: keys' columns decay one by one; Kimi Linear's gates come out of narrow
    products."""

    joined = 3

    def mix(self, step: Step, parts: Sequence[Tensor]) -> Tensor:
        """See `MixerPlan`."""
        mixer, ops, cached, width = self.mixer, step.ops, step.cached, self.mixer.head_dim
        mixed, f, b, gate = parts
        forget, gate_of = mixer.forget_gate, getattr(mixer, "g_b_proj", None)
        f = linear(ops, f, forget.f_b_proj) if hasattr(forget, "f_b_proj") else f
        gate = (gate if gate_of is None else linear(ops, gate, gate_of))[:, None]
        decay = f[:, None], b[:, None], forget.A_log.view(-1), forget.dt_bias
        bound = forget.lower_bound if getattr(forget, "safe_gate", False) else None  # Bailing hybrid's
        scale, x = width**-0.5, mixed.unflatten(0, step.shape)
        rows = cached.begin(x, self.conv.weight.shape[2], x.shape[2])
        if mixer.activation == "silu" and cached.takes_whole_steps:
            given = self.conv, decay, gate, self.norm_weight, (b.shape[1], width, width)
            options = {"scale": scale, "bound": bound, "eps": self.norm_eps, "activation": "sigmoid"}
            done: Tensor = cached.delta_step(rows, mixed, *given, **options)
            return done.flatten(1)
        mixed = cached.convolve(x, self.conv, mixer.activation, step=rows)
        q, k, v = (x.unflatten(-1, (-1, width)) for x in mixed.chunk(3, dim=-1))
        g, beta = self.gates(step, *decay, bound=bound)
        g = g.unflatten(-1, (-1, width))
        out = cached.attend(q, k, v, g, beta, scale=scale, delta_rule=True)
        return self.normed(step, out.flatten(0, 1), gate, activation="sigmoid")


class Mamba2Plan(StatePlan):
    """Of a Mamba 2 mixer."""

    def plan(self) -> None:
        """See `MixerPlan`."""
        super().plan()
        mixer, norm = self.mixer, self.mixer.norm
        self.sizes_of_state = mixer.num_heads, mixer.ssm_state_size, mixer.head_dim
        low, high = mixer.time_step_limit
        self.limits = {"min_step": low, "max_step": None if high == inf else high}
        #: Numbers that are normed together; 0 without a norm. One group where the norm has no size of them:
        #: Bamba and Granite 4 in transformers 5.17.
        size = getattr(norm, "group_size", mixer.intermediate_size // getattr(norm, "n_groups", 1))
        self.norm_size = 0 if isinstance(norm, nn.Identity) else size
        self.gate_first = not getattr(norm, "norm_before_gate", False)
        #: Whether the norm is one of the output's product.
        whole = self.norm_size == mixer.intermediate_size and self.gate_first
        self.leaves_norm = whole and self.fuses_norms

    def reserve(self, step: Step, parts: Sequence[Tensor]) -> tuple[AttentionMetadata, Tensor | None]:
        """See `MixerPlan`: the rows, and of a step that runs as a whole its ``out``, which then shares no
        memory with what attention reads."""
        (whole,) = parts
        rows = step.cached.begin(
            whole.unflatten(0, step.shape), self.conv.weight.shape[2], self.mixer.conv_dim
        )
        takes = self.mixer.activation == "silu" and rows.max_query_len == 1 and step.cached.takes_whole_steps
        heads, _, head_dim = self.sizes_of_state
        return rows, whole.new_empty(whole.shape[0], heads, head_dim) if takes else None

    def mixed(self, step: Step, parts: Sequence[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """See `MixerPlan`."""
        mixer, cached, groups = self.mixer, step.cached, self.mixer.n_groups
        num_heads, width, head_dim = self.sizes_of_state
        (whole,) = parts
        gate, mixed, dt = whole.split([mixer.intermediate_size, mixer.conv_dim, num_heads], dim=-1)
        x = mixed.unflatten(0, step.shape)
        rows, out = step.reserved or self.reserve(step, parts)
        if out is not None:
            # compiled code chooses memory by itself
            beside = step.reserved is not None and not torch.compiler.is_compiling()
            options: dict[str, Any] = {**self.limits, "beside": beside}
            if self.leaves_norm or not self.norm_size:
                options["gate"] = gate.unflatten(-1, (num_heads, head_dim))
            given = self.conv, (dt, mixer.A_log, mixer.dt_bias), mixer.D, self.sizes_of_state, groups, out
            cached.mamba2_step(rows, mixed, *given, **options)
            if self.leaves_norm:
                return out.flatten(1), {"norm_weight": self.norm_weight, "norm_eps": self.norm_eps}
            return self._normed(step, out, gate) if self.norm_size else out.flatten(1), {}
        mixed = cached.convolve(x, self.conv, mixer.activation, step=rows)
        v, k, q = mixed.split([mixer.intermediate_size, groups * width, groups * width], dim=-1)
        v, k, q = (each.unflatten(-1, (-1, n)) for each, n in ((v, head_dim), (k, width), (q, width)))
        g, beta = self.gates(step, dt[:, None], None, mixer.A_log, mixer.dt_bias, **self.limits)
        made = cached.attend(q, k, v, g, beta, scale=1.0, delta_rule=False).flatten(0, 1)
        skip = v.flatten(0, 1)
        if not self.norm_size:
            return torch.addcmul(made, skip, mixer.D[:, None].to(made.dtype)).flatten(1) * silu(gate), {}
        return self._normed(step, made, gate, skip=skip, skip_weight=mixer.D), {}

    def _normed(self, step: Step, x: Tensor, gate: Tensor, **options: Any) -> Tensor:
        x = x.view(x.shape[0], -1, self.norm_size)
        return self.normed(step, x, gate[:, None], gate_first=self.gate_first, **options)


#: What mixes tokens -> what its layers' plan is.
STATE_PLANS: dict[str, type[StatePlan]] = {
    "ShortConv": ShortConvPlan,
    "GatedDeltaNet": DeltaNetPlan,
    "DeltaAttention": KimiDeltaPlan,
    **dict.fromkeys(("Mixer", "MambaLayer", "Mamba2Mixer", "MambaMixer"), Mamba2Plan),
}
