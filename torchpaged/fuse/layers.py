"""The forward of a fused decoder layer. `torchpaged.hf.fuse` gives it to the layers; nothing here is called
by hand.

A step over a paged cache runs on the ops; anything else (no cache, another one, dense mode, training) runs
the layer's own forward. What a step needs is looked up once, in a `LayerPlan`: weights, norms, flags. What
mixes the tokens is a subclass's: attention_layers.py, latent_layers.py, state_layers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.fuse.architectures import ARCHITECTURES
from torchpaged.fuse.fusible import activation_of, norm_of
from torchpaged.fuse.rope_table import RopeTable, computed
from torchpaged.fuse.stacked import Stacked
from torchpaged.hf.cache_argument import CACHE, take_cache
from torchpaged.hf.layer import LayerCache, PagedLayer
from torchpaged.hf.owner import PagedOwner

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


def paged_owner(cache: Any) -> PagedOwner | None:
    """``cache`` itself if steps over it are paged, else None."""
    layers = getattr(cache, "layers", None) or ()
    owner = next((layer.owner for layer in layers if isinstance(layer, PagedLayer)), None)
    return None if owner is None or owner.dense else owner


class Step(NamedTuple):
    """One forward of a layer over its paged cache.

    ``ops``: the backend's. ``cached``: the layer of the cache. ``shape``: ``(batch, query_len)``.
    ``position_ids``, ``rotary``, ``mask``, ``options``: what the layer was given, positions where it rotates;
    ``rotary``: cosines and sines, or who computes them, or None.
    """

    ops: BackendOps
    cached: Any
    shape: tuple[int, int]
    position_ids: Any
    rotary: Any
    mask: Tensor | None
    options: dict[str, Any]


class LayerPlan:
    """What the fused forward of one layer uses.

    Args:
        layer: the decoder layer; `fusible.why_unknown` found nothing.
        passes: the passes that apply to it.
        rope: the layer's table, NO_ROTATION, or None = rotate as the model does.
    """

    mixes = True

    def __init__(self, layer: Any, passes: Sequence[str], rope: RopeTable | str | None) -> None:
        self.architecture = architecture = ARCHITECTURES[type(layer).__name__]
        self.passes, self.rope = tuple(passes), rope
        self.layer: Any = layer
        self.mlp: Any = architecture.mlp_of(layer)
        names = architecture.names
        self.inputs: Stacked | None = None
        if architecture.mixes(layer):
            self.mixer: Any = getattr(layer, architecture.mixer_of(layer)[0])
            self.layer_idx: int = self.mixer.layer_idx
            first, last = architecture.projections(layer), architecture.mixer_linears(layer)[-1]
            self.projections: list[Any] = [getattr(self.mixer, name) for name in first]
            self.inputs = Stacked(self.projections) if "qkv" in passes else None
            self.output: Any = getattr(self.mixer, last)
            self._plan_mixer()
        self.beside: Any = architecture.beside_of(layer)
        gates: list[Any] = [getattr(self.mlp, name, None) for name in names.linears]
        self.down: Any = gates.pop()
        self.gate_up = Stacked(gates) if "gate_up" in passes else None
        self._stacks = [stacked for stacked in (self.inputs, self.gate_up) if stacked is not None]
        self.activation = activation_of(layer) if self.gate_up is not None else None
        self.fuses_norms = "norm" in passes
        self.norms: list[Any] = [getattr(layer, name) for name in names.norms]
        self.post_norms: list[Any] = [getattr(layer, name) for name in names.post_norms]
        self.residual_scale = (
            getattr(layer, architecture.residual_scale) if architecture.residual_scale else None
        )
        self._look_up()

    # ------------------------------------------------------------------------------- a subclass's: the mixer
    def _plan_mixer(self) -> None:
        """The constants of what mixes the tokens."""

    def _look_up_mixer(self) -> None:
        """Weights of its norms."""

    def cached(self, cache: Any) -> Any:
        """The layer of ``cache`` that a fused step runs over, or None."""
        return paged_layer(cache, self.layer_idx)

    def begin(self, cached: Any, hidden_states: Tensor) -> BackendOps:
        """Before the first op of a step over ``hidden_states [batch, query_len, *]``: pools and a backend are
        made where there are none. The ops."""
        raise NotImplementedError

    def mix(self, step: Step, x: Tensor) -> Tensor:
        """What the tokens ``x [T, hidden_size]`` are mixed to, ``[T, *]``, before ``output``; writes to the
        cache."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ weights
    def _look_up(self) -> None:
        """The norms' weights and numbers, as options of the ops."""
        offset = self.architecture.norm_offset
        self.norm_options: list[dict[str, Any]] = [
            dict(zip(("norm_weight", "norm_eps", "norm_offset"), norm_of(norm, offset), strict=True))
            for norm in self.norms
        ]
        self._look_up_mixer()

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
    def linear(
        self, ops: BackendOps, x: Tensor, layer: Any, width: int | None = None, **options: Any
    ) -> Tensor:
        """``[T, width]`` of the op ``linear`` by weight and bias of ``layer``; default: all its rows."""
        out = x.new_empty(x.shape[0], layer.weight.shape[0] if width is None else width)
        ops.linear(x, layer.weight, out, bias=layer.bias, **options)
        return out

    def project(self, step: Step, x: Tensor) -> Sequence[Tensor]:
        """What the first projections of the mixer give of the layer's input, ``[T, *]`` each."""
        x, options = self.before(step.ops, x, 0, self.inputs)
        if self.inputs is None:
            return [linear(x) for linear in self.projections]
        whole = self.linear(step.ops, x, self.inputs, **options)
        return whole.split([linear.out_features for linear in self.projections], dim=-1)

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

    def after(self, ops: BackendOps, x: Tensor, y: Tensor, number: int, last: Any) -> Tensor:
        """``x +`` the block's last linear layer of ``y``, with the norm in between where the family
        has one."""
        if not self.fuses_norms:
            return self._added(ops, x, last(y), number)
        if self.residual_scale is None and not self.post_norms:
            return self.linear(ops, y, last, residual=x)
        return self._added(ops, x, self.linear(ops, y, last), number)

    def _added(self, ops: BackendOps, x: Tensor, y: Tensor, number: int) -> Tensor:
        """``x +`` a block's output, normed or scaled where the family does."""
        if self.post_norms:
            norm = self.post_norms[number]
            return self._normed(ops, y, norm, post_residual=x) if self.fuses_norms else x + norm(y)
        return x + y if self.residual_scale is None else torch.add(x, y, alpha=self.residual_scale)

    def feed(self, ops: BackendOps, x: Tensor, shape: tuple[int, int]) -> Tensor:
        """``x +`` the MLP of ``x``."""
        h, options = self.before(ops, x, -1, self.gate_up)
        if self.gate_up is not None:
            width = self.down.in_features
            h = self.linear(ops, h, self.gate_up, width, activation=self.activation, **options)
            return self.after(ops, x, h, -1, self.down)
        h = h.unflatten(0, shape)
        y = self.mlp(h)
        y = y[0] if isinstance(y, tuple) else y  # a mixture of experts also gives its router's scores
        if self.beside is not None:
            y = self.beside(h) + y
        return self._added(ops, x, y.flatten(0, 1), -1)


class FeedPlan(LayerPlan):
    """Of a layer that mixes no tokens: an MLP, or a mixture of experts."""

    mixes = False

    def cached(self, cache: Any) -> PagedOwner | None:
        """The cache itself, once a layer before this one has chosen its backend."""
        owner = paged_owner(cache)
        return owner if owner is not None and owner.ready else None

    def begin(self, cached: PagedOwner, hidden_states: Tensor) -> BackendOps:
        """See `LayerPlan`."""
        return cached.backend.ops


def fused_forward(
    self: Any,
    hidden_states: Tensor,
    *,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Any:
    """A decoder layer's forward: the step above if its cache is paged, else what the layer did before."""
    plan: LayerPlan = self._torchpaged_plan
    cache = take_cache(kwargs)
    cached = plan.cached(cache)
    lacks_positions = position_ids is None and isinstance(plan.rope, RopeTable)
    if cached is None or lacks_positions or self.training:
        return type(self).forward(
            self,
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=computed(position_embeddings),
            **{CACHE: cache},
            **kwargs,
        )
    refuse_grad(hidden_states=hidden_states)
    *shape, width = hidden_states.shape
    kwargs.pop("use_cache", None)
    step = Step(
        plan.begin(cached, hidden_states),
        cached,
        (shape[0], shape[1]),
        position_ids,
        position_embeddings,
        attention_mask,
        kwargs,
    )
    x = hidden_states.reshape(-1, width)
    if plan.mixes:
        mixed = plan.mix(step, x)
        if not isinstance(cache, LayerCache):
            cached.complete()
        x = plan.after(step.ops, x, mixed, 0, plan.output)
    if plan.mlp is not None:
        x = plan.feed(step.ops, x, step.shape)
    x = x.view(*shape, width)
    return (x, None) if plan.architecture.gives_weights else x
