"""The forward of a fused decoder layer. `torchpaged.hf.fuse` gives it to the layers; nothing here is called
by hand.

A step over a paged cache runs on the ops; anything else (no cache, another one, dense mode, training) runs
the layer's own forward. What a step needs is looked up once, in a `LayerPlan`: weights, norms, flags. A Llama
layer then is six launches: linear (norm, qkv), rope_write_kv, paged_attention, linear (o, residual), linear
(norm, gate and up, activation), linear (down, residual).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.fuse.fusible import ARCHITECTURES, activation_of, norm_of
from torchpaged.fuse.rope_table import RopeTable, computed
from torchpaged.fuse.stacked import Stacked
from torchpaged.hf.attention import paged_attention_forward
from torchpaged.hf.cache import PagedCache
from torchpaged.hf.layer import LayerCache, PagedLayer

#: Marks, among a plan's rotations, a layer without any (NoPE).
NO_ROTATION = "none"


def paged_layer(cache: Any, index: int) -> PagedLayer | None:
    """Layer ``index`` of ``cache`` if a step over it is paged, else None."""
    # within compile_layers(): looking at the index would tie the code to one layer
    if isinstance(cache, LayerCache):
        return cache.layer
    layers = getattr(cache, "layers", None)
    if layers is None or index >= len(layers):
        return None
    layer = layers[index]
    return layer if isinstance(layer, PagedLayer) and not layer.owner.dense else None


class LayerPlan:
    """What the fused forward of one layer uses.

    Args:
        layer: the decoder layer; `fusible.why_unknown` found nothing.
        passes: the passes that apply to it.
        rope: the layer's table, NO_ROTATION, or None = rotate as the model does.
    """

    def __init__(self, layer: Any, passes: Sequence[str], rope: RopeTable | str | None) -> None:
        self.architecture = architecture = ARCHITECTURES[type(layer).__name__]
        self.passes, self.rope = tuple(passes), rope
        self.layer: Any = layer
        self.attn: Any = layer.self_attn
        self.mlp: Any = layer.mlp
        self.layer_idx: int = self.attn.layer_idx
        self.qkv: Stacked | None
        self._plan_attention()
        self.gate_up = Stacked([self.mlp.gate_proj, self.mlp.up_proj]) if "gate_up" in passes else None
        self._stacks = [stacked for stacked in (self.qkv, self.gate_up) if stacked is not None]
        self.activation = activation_of(self.mlp) if self.gate_up is not None else None
        self.fuses_norms = "norm" in passes
        before_mlp = "pre_feedforward_layernorm" if architecture.post_norms else "post_attention_layernorm"
        self.norms: list[Any] = [layer.input_layernorm, getattr(layer, before_mlp)]
        self.post_norms: list[Any] = (
            [layer.post_attention_layernorm, layer.post_feedforward_layernorm]
            if architecture.post_norms
            else []
        )
        self.residual_scale = layer.residual_scale if architecture.scales_residuals else None
        self._look_up()

    def _plan_attention(self) -> None:
        """The constants of attention; ``head_dim``, ``qkv`` and ``rotate`` among them."""
        attn = self.attn
        self.head_dim: int = attn.head_dim
        self.heads = tuple(getattr(attn, f"{x}_proj").out_features // self.head_dim for x in "qkv")
        self.qkv = Stacked([attn.q_proj, attn.k_proj, attn.v_proj]) if "qkv" in self.passes else None
        self.rotate = getattr(sys.modules[type(attn).__module__], "apply_rotary_pos_emb")  # noqa: B009
        mistral = self.architecture.family == "Mistral"
        window = getattr(attn.config, "sliding_window", None) if mistral else None
        self.attention_arguments: dict[str, Any] = {
            "scaling": attn.scaling,
            "sliding_window": getattr(attn, "sliding_window", window),
            "softcap": attn.attn_logit_softcapping if self.architecture.soft_cap else None,
        }

    def _look_up(self) -> None:
        """The norms' weights and numbers, as options of the ops."""
        offset = self.architecture.norm_offset
        self.norm_options: list[dict[str, Any]] = [
            dict(zip(("norm_weight", "norm_eps", "norm_offset"), norm_of(norm, offset), strict=True))
            for norm in self.norms
        ]
        self._look_up_attention()

    def _look_up_attention(self) -> None:
        offset = self.architecture.norm_offset
        self.head_norms: dict[str, Any] = {}
        if self.architecture.qk_norm:
            weight, eps, _ = norm_of(self.attn.q_norm, offset)
            self.head_norms = {
                "q_norm": weight,
                "k_norm": self.attn.k_norm.weight,
                "norm_eps": eps,
                "norm_offset": offset,
            }

    def refresh(self) -> None:
        """After weights were moved or replaced by others of their kind."""
        for stacked in self._stacks:
            stacked.restack()
        self._look_up()

    def separate(self) -> None:
        """Undo what the plan did to the weights."""
        for stacked in self._stacks:
            stacked.separate()

    # --------------------------------------------------------------------------------------- pieces of a step
    def linear(self, ops: BackendOps, x: Tensor, weight: Tensor, width: int, **options: Any) -> Tensor:
        """``[T, width]`` of the op ``linear``."""
        out = x.new_empty(x.shape[0], width)
        ops.linear(x, weight, out, **options)
        return out

    def _normed(self, ops: BackendOps, x: Tensor, norm: Any, **options: Any) -> Tensor:
        weight, eps, offset = norm_of(norm, self.architecture.norm_offset)
        out = torch.empty_like(x)
        ops.rms_norm(x, weight, out, eps=eps, offset=offset, **options)
        return out

    def before(
        self, ops: BackendOps, x: Tensor, number: int, stacked: Stacked | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The norm ahead of a block: an option of its linear if both are fused, else done here."""
        if not self.fuses_norms:
            return self.norms[number](x), {}
        if stacked is None:
            return self._normed(ops, x, self.norms[number]), {}
        return x, self.norm_options[number]

    def after(self, ops: BackendOps, x: Tensor, y: Tensor, number: int, last: nn.Linear) -> Tensor:
        """``x +`` the block's last linear layer of ``y``, with the norm in between where the family
        has one."""
        if not self.fuses_norms:
            y = last(y)
            return self._add(x, self.post_norms[number](y) if self.post_norms else y)
        if self.residual_scale is not None:
            return self._add(x, self.linear(ops, y, last.weight, last.out_features, bias=last.bias))
        if not self.post_norms:
            return self.linear(ops, y, last.weight, last.out_features, bias=last.bias, residual=x)
        y = self.linear(ops, y, last.weight, last.out_features, bias=last.bias)
        return self._normed(ops, y, self.post_norms[number], post_residual=x)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        """A block's output on ``x``, scaled where the family does."""
        return x + y if self.residual_scale is None else torch.add(x, y, alpha=self.residual_scale)

    def empty_states(self, x: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Keys and values of no token, as the layer's pools are made for."""
        like = x.new_empty(batch, self.heads[1], 0, self.head_dim)
        return like, like

    def project(self, ops: BackendOps, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v ``[T, heads, head_dim]``, out of the layer's input."""
        x, options = self.before(ops, x, 0, self.qkv)
        if self.qkv is None:
            parts = (self.attn.q_proj(x), self.attn.k_proj(x), self.attn.v_proj(x))
            return tuple(
                part.unflatten(-1, (heads, self.head_dim))
                for part, heads in zip(parts, self.heads, strict=True)
            )
        whole = self.linear(
            ops, x, self.qkv.weight, sum(self.heads) * self.head_dim, bias=self.qkv.bias, **options
        )
        return whole.unflatten(-1, (sum(self.heads), self.head_dim)).split(self.heads, dim=1)

    def attend(
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
        """Attention's output ``[T, num_heads * head_dim]``, before o_proj; writes the new keys and values."""
        q, k, v = self.project(ops, x)
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
        return out.flatten(2).flatten(0, 1)

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
            q, k = self.attn.q_norm(q), self.attn.k_norm(k)
        if getattr(self.attn, "use_rope", True):
            cos, sin = computed(rotary)
            q, k = self.rotate(q, k, cos, sin)
        keys, values = cached.write(k, v)
        return q.transpose(1, 2).flatten(0, 1), keys, values

    def feed(self, ops: BackendOps, x: Tensor, shape: tuple[int, int]) -> Tensor:
        """``x +`` the MLP of ``x``."""
        h, options = self.before(ops, x, 1, self.gate_up)
        if self.gate_up is not None:
            h = self.linear(
                ops,
                h,
                self.gate_up.weight,
                self.mlp.gate_proj.out_features,
                bias=self.gate_up.bias,
                activation=self.activation,
                **options,
            )
            return self.after(ops, x, h, 1, self.mlp.down_proj)
        y = self.mlp(h.unflatten(0, shape))
        # a mixture of experts also gives its router's scores
        y = (y[0] if isinstance(y, tuple) else y).flatten(0, 1)
        if not self.post_norms:
            return self._add(x, y)
        return (
            self._normed(ops, y, self.post_norms[1], post_residual=x)
            if self.fuses_norms
            else x + self.post_norms[1](y)
        )


def fused_forward(
    self: Any,
    hidden_states: Tensor,
    *,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Tensor:
    """A decoder layer's forward: the step above if ``past_key_values`` is paged, else what the layer
    did before."""
    plan: LayerPlan = self._torchpaged_plan
    cached = paged_layer(past_key_values, plan.layer_idx)
    if cached is None or position_ids is None or self.training:
        result: Tensor = type(self).forward(
            self,
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            position_embeddings=computed(position_embeddings),
            **kwargs,
        )
        return result
    refuse_grad(hidden_states=hidden_states)
    batch, query_len, width = hidden_states.shape
    owner = cached.owner
    if not (cached.is_initialized and owner.ready):
        key, value = plan.empty_states(hidden_states, batch)
        if cached.is_initialized:
            owner.prepare(cached, key, value.shape[3])
        else:
            cached.lazy_initialization(key, value)
    kwargs.pop("use_cache", None)
    ops, x = owner.backend.ops, hidden_states.reshape(batch * query_len, width)
    attended = plan.attend(
        ops, x, cached, position_ids, position_embeddings, (batch, query_len), attention_mask, kwargs
    )
    if not isinstance(past_key_values, LayerCache):
        cached.complete()
    x = plan.after(ops, x, attended, 0, plan.attn.o_proj)
    return plan.feed(ops, x, (batch, query_len)).view(batch, query_len, width)
