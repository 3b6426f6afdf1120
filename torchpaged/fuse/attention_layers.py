"""Fused layers of attention over keys and values.

A Llama layer is six launches: linear (norm, qkv), rope_write_kv, paged_attention, linear (o, residual),
linear (norm, gate and up, activation), linear (down, residual). What surrounds attention is `LayerPlan`'s.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BackendOps
from torchpaged.fuse.fusible import norm_of
from torchpaged.fuse.mixers import MixerPlan, Step
from torchpaged.fuse.rope_table import RopeTable, computed
from torchpaged.hf.attention import paged_attention_forward
from torchpaged.hf.cache import PagedCache
from torchpaged.metadata import AttentionMetadata


class AttentionPlan(MixerPlan):
    """What the fused forward of a layer with attention uses; see `MixerPlan`."""

    #: Whether queries come out of `rotate_and_write` as the keys of the pools have them.
    absorbs = False

    def plan(self) -> None:
        """See `MixerPlan`."""
        attn = self.mixer
        self.head_dim: int = attn.head_dim
        self._rotate = self._of_module("apply_rotary_pos_emb")
        mistral = self.architecture.family in ("Mistral", "Mixtral")
        window = getattr(attn.config, "sliding_window", None) if mistral else None
        self.attention_arguments: dict[str, Any] = {
            "scaling": attn.scaling,
            "sliding_window": getattr(attn, "sliding_window", window),
            "softcap": attn.attn_logit_softcapping if self.architecture.soft_cap else None,
        }

    def _of_module(self, name: str) -> Any:
        """A function of the modelling file."""
        return getattr(sys.modules[type(self.mixer).__module__], name)

    def look_up(self) -> None:
        """See `MixerPlan`."""
        self.norms_of_heads: list[Any] = []
        self.head_norms: dict[str, Any] = {}
        names = self.architecture.head_norms_of(self.mixer)
        if names:
            self.norms_of_heads = [getattr(self.mixer, name) for name in names]
            weights = dict(zip(("q_norm", "k_norm"), (x.weight for x in self.norms_of_heads), strict=True))
            _, eps, offset = norm_of(self.norms_of_heads[0], self.architecture.norm_offset)
            self.head_norms = {**weights, "norm_eps": eps, "norm_offset": offset}

    def begin(self, cached: Any, hidden_states: Tensor) -> BackendOps:
        """See `MixerPlan`."""
        if not (cached.is_initialized and cached.owner.ready):
            key, value = self.empty_states(hidden_states, hidden_states.shape[0])
            if cached.is_initialized:
                cached.owner.prepare(cached, key, value.shape[3])
            else:
                cached.lazy_initialization(key, value)
        ops: BackendOps = cached.owner.backend.ops
        return ops

    def mix(self, step: Step, parts: Sequence[Tensor]) -> Tensor:
        """See `MixerPlan`: ``[T, num_heads * head_dim]``."""
        cached, options = step.cached, dict(step.options)
        q, k, v, *gates = self.states(step, parts)
        gate = gates[0] if gates else None
        if self.architecture.output_gate:
            q, gate = q.unflatten(1, (-1, 2)).unbind(2)
        if self.rope is None or not cached.takes_at_once(step.shape[1]):
            q, k, v = (each.unflatten(0, step.shape).transpose(1, 2) for each in (q, k, v))
            q, k, v = self.rotate_as_the_model(computed(step.rotary), q, k, v)
            keys, values = cached.write(k, v)
        else:
            q = self._write(step, q, k, v).unflatten(0, step.shape).transpose(1, 2)
            keys, values = cached.keys, cached.values
            if self.absorbs:
                options["absorbed"] = True
        if self.architecture.sinks:
            options["s_aux"] = self.mixer.sinks
        options |= self.attention_arguments
        out = paged_attention_forward(self.mixer, q, keys, values, step.mask, **options)[0].flatten(0, 1)
        if gate is None:
            return out.flatten(1)
        gated = torch.empty_like(out)
        step.ops.gate_heads(out, gate, gated)
        return gated.flatten(1)

    def _write(self, step: Step, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values, rotated where they are, to the pools; the queries to attend with."""
        cached = step.cached
        rows = cached.owner.advance(cached, *step.shape)
        if not isinstance(self.rope, RopeTable):
            written = {"are_query_tokens": cached.writes_query_tokens(rows), **cached.scales}
            step.ops.write_kv(k, v, cached.keys, cached.values, rows.slot_mapping, **written)
            return q
        # the engine's positions end at max_position_embeddings, the table's first length
        if isinstance(cached.owner, PagedCache):
            self.rope.ensure(cached.owner.max_seq_len, q.device)
        positions = step.position_ids.expand(step.shape).reshape(-1)
        return self.rotate_and_write(step, rows, (positions, self.rope.cos_sin), q, k, v)

    # ----------------------------------------------------------------- what another kind of keys has instead
    def empty_states(self, x: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Keys and values of no token, as the layer's pools are made for."""
        like = x.new_empty(batch, self.projections[1].out_features // self.head_dim, 0, self.head_dim)
        return like, like

    def states(self, step: Step, parts: Sequence[Tensor]) -> list[Tensor]:
        """q, k and v ``[T, heads, *]`` of what was projected, not rotated; and a gate of the output, if it is
        apart from q."""
        return [part.unflatten(-1, (-1, self.head_dim)) for part in parts]

    def rotate_and_write(
        self, step: Step, rows: AttentionMetadata, places: tuple[Tensor, Tensor], *states: Tensor
    ) -> Tensor:
        """By one op, with the norms of q and k; the rotated q. ``places``: positions and the table."""
        (q, k, v), (positions, cos_sin) = states, places
        q_out, cached = torch.empty_like(q, memory_format=torch.contiguous_format), step.cached
        pools = cached.keys, cached.values
        # With the mark positions are read early, which a copy of them right in front is not there for.
        given = step.position_ids.numel() == positions.shape[0] and step.position_ids.is_contiguous()
        mark = given and cached.writes_query_tokens(rows)
        options = {"are_query_tokens": mark, **cached.scales, **self.head_norms}
        step.ops.rope_write_kv(q, k, v, positions, cos_sin, rows.slot_mapping, q_out, *pools, **options)
        return q_out

    def rotate_as_the_model(self, angles: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Normed and rotated ``[batch, heads, query_len, *]``, as attention and the cache have them."""
        if self.norms_of_heads:
            q, k = (norm(x) for norm, x in zip(self.norms_of_heads, (q, k), strict=True))
        if angles is not None and getattr(self.mixer, "use_rope", True):
            q, k = self._rotate(q, k, *angles)
        return q, k, v
