"""Fused layers of attention over keys and values.

A Llama layer is six launches: linear (norm, qkv), rope_write_kv, paged_attention, linear (o, residual),
linear (norm, gate and up, activation), linear (down, residual). What surrounds attention is `LayerPlan`'s.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BackendOps
from torchpaged.fuse.fusible import norm_of
from torchpaged.fuse.layers import LayerPlan
from torchpaged.fuse.rope_table import RopeTable, computed
from torchpaged.fuse.stacked import Stacked
from torchpaged.hf.attention import paged_attention_forward
from torchpaged.hf.cache import PagedCache
from torchpaged.hf.layer import PagedLayer


class AttentionPlan(LayerPlan):
    """What the fused forward of a layer with attention uses; see `LayerPlan`."""

    def _plan_mixer(self) -> None:
        attn = self.attn = self.mixer
        self.head_dim: int = attn.head_dim
        self.heads = tuple(getattr(attn, f"{x}_proj").out_features // self.head_dim for x in "qkv")
        self.inputs = Stacked([attn.q_proj, attn.k_proj, attn.v_proj]) if "qkv" in self.passes else None
        self.q_norm: Any
        self.k_norm: Any
        self.q_norm, self.k_norm = (getattr(attn, name, None) for name in self.architecture.names.head_norms)
        self.rotate = getattr(sys.modules[type(attn).__module__], "apply_rotary_pos_emb")  # noqa: B009
        mistral = self.architecture.family == "Mistral"
        window = getattr(attn.config, "sliding_window", None) if mistral else None
        self.attention_arguments: dict[str, Any] = {
            "scaling": attn.scaling,
            "sliding_window": getattr(attn, "sliding_window", window),
            "softcap": attn.attn_logit_softcapping if self.architecture.soft_cap else None,
        }

    def _look_up_mixer(self) -> None:
        offset = self.architecture.norm_offset
        self.head_norms: dict[str, Any] = {}
        if self.architecture.qk_norm:
            weight, eps, _ = norm_of(self.q_norm, offset)
            self.head_norms = {
                "q_norm": weight,
                "k_norm": self.k_norm.weight,
                "norm_eps": eps,
                "norm_offset": offset,
            }

    def begin(self, cached: Any, hidden_states: Tensor) -> BackendOps:
        """See `LayerPlan`."""
        if not (cached.is_initialized and cached.owner.ready):
            key, value = self.empty_states(hidden_states, hidden_states.shape[0])
            if cached.is_initialized:
                cached.owner.prepare(cached, key, value.shape[3])
            else:
                cached.lazy_initialization(key, value)
        ops: BackendOps = cached.owner.backend.ops
        return ops

    def empty_states(self, x: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Keys and values of no token, as the layer's pools are made for."""
        like = x.new_empty(batch, self.heads[1], 0, self.head_dim)
        return like, like

    def project(self, ops: BackendOps, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v ``[T, heads, head_dim]``, out of the layer's input."""
        x, options = self.before(ops, x, 0, self.inputs)
        if self.inputs is None:
            parts = (self.attn.q_proj(x), self.attn.k_proj(x), self.attn.v_proj(x))
            return tuple(
                part.unflatten(-1, (heads, self.head_dim))
                for part, heads in zip(parts, self.heads, strict=True)
            )
        whole = self.linear(
            ops, x, self.inputs.weight, sum(self.heads) * self.head_dim, bias=self.inputs.bias, **options
        )
        return whole.unflatten(-1, (sum(self.heads), self.head_dim)).split(self.heads, dim=1)

    def mix(
        self,
        ops: BackendOps,
        x: Tensor,
        cached: PagedLayer,
        position_ids: Tensor,
        rotary: Any,
        shape: tuple[int, int],
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """See `LayerPlan`: ``[T, num_heads * head_dim]``."""
        q, k, v = self.project(ops, x)
        gate = None
        if self.architecture.output_gate:
            q, gate = q.unflatten(1, (-1, 2)).unbind(2)
        if self.rope is None or not cached.takes_at_once(shape[1]):
            q, keys, values = self._rotate_as_the_model(cached, q, k, v, rotary, shape)
        else:
            q = self._rotate(ops, cached, q, k, v, position_ids, shape)
            keys, values = cached.keys, cached.values
        if self.architecture.sinks:
            options = {**options, "s_aux": self.attn.sinks}
        q = q.unflatten(0, shape).transpose(1, 2)
        out, _ = paged_attention_forward(
            self.attn, q, keys, values, mask, **self.attention_arguments, **options
        )
        out = out.flatten(0, 1)
        return (out if gate is None else out * gate.sigmoid()).flatten(1)

    def _rotate(
        self,
        ops: BackendOps,
        cached: PagedLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_ids: Tensor,
        shape: tuple[int, int],
    ) -> Tensor:
        step = cached.owner.advance(cached, *shape)
        if not isinstance(self.rope, RopeTable):
            ops.write_kv(
                k,
                v,
                cached.keys,
                cached.values,
                step.slot_mapping,
                are_query_tokens=cached.writes_query_tokens(step),
                **cached.scales,
            )
            return q
        # the engine's positions end at max_position_embeddings, the table's first length
        if isinstance(cached.owner, PagedCache):
            self.rope.ensure(cached.owner.max_seq_len, q.device)
        q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
        positions = position_ids.expand(shape).reshape(-1)
        ops.rope_write_kv(
            q,
            k,
            v,
            positions,
            self.rope.cos_sin,
            step.slot_mapping,
            q_out,
            cached.keys,
            cached.values,
            are_query_tokens=cached.writes_query_tokens(step),
            **cached.scales,
            **self.head_norms,
        )
        return q_out

    def _rotate_as_the_model(
        self, cached: PagedLayer, q: Tensor, k: Tensor, v: Tensor, rotary: Any, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
        if self.architecture.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if getattr(self.attn, "use_rope", True):
            cos, sin = computed(rotary)
            q, k = self.rotate(q, k, cos, sin)
        keys, values = cached.write(k, v)
        return q.transpose(1, 2).flatten(0, 1), keys, values
