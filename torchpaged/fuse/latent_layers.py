"""Fused layers of multi-head latent attention (DeepSeek-V2 and V3, GLM-4.7-Flash, MiniCPM3, Youtu, A.X K1,
Kimi Linear, Bailing hybrid).

A step: linear (norm, down-projections of queries and keys), linear (norm, up-projection of the queries, where
they have a rank of their own), rope_write_latent (norm, rotation, absorbed keys, write), mla_attention, the
values' up-projection, linear (o, residual), and the MLP. Attention itself is `AttentionPlan`'s, over latents
as keys and rotated keys as values.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, cat

from torchpaged.fuse.attention_layers import AttentionPlan
from torchpaged.fuse.fusible import norm_of
from torchpaged.fuse.mixers import Step, linear
from torchpaged.hf.models.latent import up_projections
from torchpaged.metadata import AttentionMetadata

#: transformers' function for each rotation of ``rope_write_latent``.
_ROTATE = {
    "halves": "apply_rotary_pos_emb",
    "pairs": "apply_rotary_emb",
    "pairs_to_halves": "apply_rotary_pos_emb_interleave",
}


class LatentPlan(AttentionPlan):
    """What the fused forward of a layer over latents uses; see `AttentionPlan`."""

    absorbs = True

    def cached(self, cache: Any) -> Any:
        """See `MixerPlan`; None of a model that is not attached, whose cache keeps keys and values."""
        layer = super().cached(cache)
        return layer if layer is not None and layer.latent else None

    def plan(self) -> None:
        """See `MixerPlan`."""
        attn = self.mixer
        self.widths = attn.kv_lora_rank, attn.qk_rope_head_dim
        self.head_dim = attn.qk_nope_head_dim + attn.qk_rope_head_dim
        self.rotation = self.architecture.rotation
        if self.rotation == "pairs_to_halves" and not getattr(attn.config, "rope_interleave", True):
            self.rotation = "halves"
        if self.architecture.names.rotary:
            self._rotate = self._of_module(_ROTATE[self.rotation])
        self.attention_arguments = {"scaling": attn.scaling}

    def look_up(self) -> None:
        """See `MixerPlan`."""
        weight, eps, _ = norm_of(self.mixer.kv_a_layernorm, 0.0)
        self.kv_norm = {"kv_norm": weight, "norm_eps": eps}
        self.q_norm: dict[str, Any] = {}
        if self.mixer.q_lora_rank is not None:
            weight, eps, _ = norm_of(self.mixer.q_a_layernorm, 0.0)
            self.q_norm = {"norm_weight": weight, "norm_eps": eps}

    def empty_states(self, x: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """See `AttentionPlan`; latents and rotated keys."""
        latents, keys = (x.new_empty(batch, 1, 0, width) for width in self.widths)
        return latents, keys

    def states(self, step: Step, parts: Sequence[Tensor]) -> list[Tensor]:
        """q ``[T, num_heads, nope + rope]``, latents ``[T, 1, rank]`` and keys ``[T, 1, rope]``, neither
        normed nor rotated."""
        q, latents, *gate = parts
        if self.q_norm and self.fuses_norms:
            q = linear(step.ops, q, self.mixer.q_b_proj, **self.q_norm)
        elif self.q_norm:
            q = self.mixer.q_b_proj(self.mixer.q_a_layernorm(q))
        gates = [each[..., None] for each in gate]
        return [q.unflatten(-1, (-1, self.head_dim)), *latents[:, None].split(self.widths, dim=-1), *gates]

    def rotate_and_write(
        self, step: Step, rows: AttentionMetadata, places: tuple[Tensor, Tensor], *states: Tensor
    ) -> Tensor:
        """See `AttentionPlan`; with the norm of the latents, and the keys' half of kv_b taken into q."""
        q, k, v = states
        q_out = q.new_empty(*q.shape[:2], sum(self.widths))
        absorbed, options = up_projections(self.mixer, q)[0], {"rotation": self.rotation, **self.kv_norm}
        options["are_query_tokens"] = step.cached.writes_query_tokens(rows)
        given = (*places, rows.slot_mapping, absorbed, q_out, step.cached.keys)
        step.ops.rope_write_latent(q, k[:, 0], v[:, 0], *given, **options)
        return q_out

    def rotate_as_the_model(self, angles: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """See `AttentionPlan`."""
        if not self.architecture.names.rotary:
            return q, self.mixer.kv_a_layernorm(k), v
        nope, rope = q.split([self.head_dim - self.widths[1], self.widths[1]], dim=-1)
        rope, v = self._rotate(rope, v, *(angles if isinstance(angles, tuple) else (angles,)))
        return cat((nope, rope), dim=-1), self.mixer.kv_a_layernorm(k), v
