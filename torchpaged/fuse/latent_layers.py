"""Fused layers of multi-head latent attention (DeepSeek-V2 and V3, GLM-4.7-Flash, MiniCPM3, Youtu, A.X K1).

A step: linear (norm, down-projections of queries and keys), linear (norm, up-projection of the queries, where
they have a rank of their own), rope_write_latent (norm, rotation, absorbed keys, write), mla_attention, the
values' up-projection, linear (o, residual), and the MLP. What surrounds attention is `LayerPlan`'s.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, cat

from torchpaged.custom_ops import BackendOps
from torchpaged.fuse.attention_layers import AttentionPlan
from torchpaged.fuse.fusible import norm_of
from torchpaged.fuse.rope_table import RopeTable, computed
from torchpaged.fuse.stacked import Stacked
from torchpaged.hf.attention import paged_attention_forward
from torchpaged.hf.cache import PagedCache
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.models.latent import up_projections

#: transformers' function for each rotation of ``rope_write_latent``.
_ROTATE = {
    "halves": "apply_rotary_pos_emb",
    "pairs": "apply_rotary_emb",
    "pairs_to_halves": "apply_rotary_pos_emb_interleave",
}


class LatentPlan(AttentionPlan):
    """What the fused forward of a layer over latents uses; see `AttentionPlan`."""

    def _plan_mixer(self) -> None:
        attn = self.attn = self.mixer
        self.rank, self.rope_dim = attn.kv_lora_rank, attn.qk_rope_head_dim
        self.head_dim = attn.qk_nope_head_dim + self.rope_dim
        self.first = attn.q_proj if attn.q_lora_rank is None else attn.q_a_proj
        self.inputs = Stacked([self.first, attn.kv_a_proj_with_mqa]) if "qkv" in self.passes else None
        rotation = self.architecture.rotation
        if rotation == "pairs_to_halves" and not attn.config.rope_interleave:
            rotation = "halves"
        self.rotation = rotation
        self.rotate = getattr(sys.modules[type(attn).__module__], _ROTATE[rotation])
        self.attention_arguments = {"scaling": attn.scaling}

    def _look_up_mixer(self) -> None:
        weight, eps, _ = norm_of(self.attn.kv_a_layernorm, 0.0)
        self.kv_norm = {"kv_norm": weight, "norm_eps": eps}
        self.q_norm: dict[str, Any] = {}
        if self.attn.q_lora_rank is not None:
            weight, eps, _ = norm_of(self.attn.q_a_layernorm, 0.0)
            self.q_norm = {"norm_weight": weight, "norm_eps": eps}

    def empty_states(self, x: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """See `AttentionPlan`; latents and rotated keys."""
        return x.new_empty(batch, 1, 0, self.rank), x.new_empty(batch, 1, 0, self.rope_dim)

    def project(self, ops: BackendOps, x: Tensor) -> tuple[Tensor, ...]:
        """q ``[T, num_heads, nope + rope]``, latents ``[T, rank]`` and keys ``[T, rope]``, neither normed nor
        rotated."""
        x, options = self.before(ops, x, 0, self.inputs)
        widths = [self.first.out_features, self.rank, self.rope_dim]
        if self.inputs is None:
            whole = cat((self.first(x), self.attn.kv_a_proj_with_mqa(x)), dim=-1)
        else:
            whole = self.linear(ops, x, self.inputs.weight, sum(widths), bias=self.inputs.bias, **options)
        q, kv_c, k_pe = whole.split(widths, dim=-1)
        if self.q_norm:
            up = self.attn.q_b_proj
            if self.fuses_norms:
                q = self.linear(ops, q, up.weight, up.out_features, **self.q_norm)
            else:
                q = up(self.attn.q_a_layernorm(q))
        return q.unflatten(-1, (-1, self.head_dim)), kv_c, k_pe

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
        """See `LayerPlan`."""
        q, kv_c, k_pe = self.project(ops, x)
        if isinstance(self.rope, RopeTable):
            q = self._write(ops, cached, self.rope, q, kv_c, k_pe, position_ids, shape)
            keys, values, options = cached.keys, cached.values, {**options, "absorbed": True}
        else:
            q, keys, values = self._write_as_the_model(cached, q, kv_c, k_pe, rotary, shape)
        q = q.unflatten(0, shape).transpose(1, 2)
        out, _ = paged_attention_forward(
            self.attn, q, keys, values, mask, **self.attention_arguments, **options
        )
        return out.flatten(2).flatten(0, 1)

    def _write(
        self,
        ops: BackendOps,
        cached: PagedLayer,
        table: RopeTable,
        q: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        position_ids: Tensor,
        shape: tuple[int, int],
    ) -> Tensor:
        step = cached.owner.advance(cached, *shape)
        # the engine's positions end at max_position_embeddings, the table's first length
        if isinstance(cached.owner, PagedCache):
            table.ensure(cached.owner.max_seq_len, q.device)
        q_out = q.new_empty(*q.shape[:2], self.rank + self.rope_dim)
        ops.rope_write_latent(
            q,
            kv_c,
            k_pe,
            position_ids.expand(shape).reshape(-1),
            table.cos_sin,
            step.slot_mapping,
            up_projections(self.attn, q)[0],
            q_out,
            cached.keys,
            rotation=self.rotation,
            **self.kv_norm,
        )
        return q_out

    def _write_as_the_model(
        self, cached: PagedLayer, q: Tensor, kv_c: Tensor, k_pe: Tensor, rotary: Any, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, kv_c, k_pe = (x.unflatten(0, shape).transpose(1, 2) for x in (q, kv_c[:, None], k_pe[:, None]))
        nope, rope = q.split([self.head_dim - self.rope_dim, self.rope_dim], dim=-1)
        angles = computed(rotary)
        rope, k_pe = self.rotate(rope, k_pe, *(angles if isinstance(angles, tuple) else (angles,)))
        keys, values = cached.write(self.attn.kv_a_layernorm(kv_c), k_pe)
        return cat((nope, rope), dim=-1).transpose(1, 2).flatten(0, 1), keys, values
