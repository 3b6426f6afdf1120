"""The forward of a fused decoder layer. `torchpaged.hf.fuse` gives it to the layers; nothing here is called
by hand.

A step over a paged cache runs on the ops; anything else (no cache, another one, dense mode, training) runs
the layer's own forward. What a step needs is looked up once, in a `LayerPlan`: weights, norms, flags. What
mixes the tokens is a `MixerPlan`'s: mixers.py.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.custom_ops.errors import NotCopyableError
from torchpaged.fuse.experts import ExpertsPlan
from torchpaged.fuse.families import ARCHITECTURES
from torchpaged.fuse.fusible import activation_of, norm_of
from torchpaged.fuse.mixers import MixerPlan, Step, linear, normed
from torchpaged.fuse.multipliers import Multipliers
from torchpaged.fuse.rope_table import RopeTable, computed
from torchpaged.fuse.stacked import Stacked
from torchpaged.hf.cache_argument import CACHE, take_cache
from torchpaged.hf.call import autocasts
from torchpaged.hf.compile_layers import LayerCache
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.owner import PagedOwner
from torchpaged.model_state import hooks_of


def paged_owner(cache: Any) -> PagedOwner | None:
    """``cache`` itself if steps over it are paged, else None."""
    layers = getattr(cache, "layers", None) or ()
    owner = next((layer.owner for layer in layers if isinstance(layer, PagedLayer)), None)
    return None if owner is None or owner.dense else owner


class FusedPart:
    """What a fused model holds, which may be copied and not pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __reduce__(self) -> Any:
        """Refuse: what is unpickled looks the fused forwards up by their names, and finds none.

        Raises:
            NotCopyableError: always.
        """
        raise NotCopyableError(
            "a fused model can't be pickled: call torchpaged.hf.unfuse(model) before, and fuse what is "
            "loaded; copy.deepcopy and model.save_pretrained take it as it is"
        )


class LayerPlan(FusedPart):
    """What the fused forward of one layer uses.

    Args:
        layer: the decoder layer; `fusible.why_unknown` found nothing.
        passes: the passes that apply to it.
        mixers: what mixes its tokens, each over the same input; none in a layer that only feeds.
    """

    def __init__(self, layer: Any, passes: Sequence[str], mixers: Sequence[MixerPlan]) -> None:
        self.architecture = architecture = ARCHITECTURES[type(layer).__name__]
        self.passes, self.mixers = tuple(passes), list(mixers)
        self.layer: Any = layer
        self.ends: Any = None  # the `Ends`, of the last layer
        self.mlp: Any = architecture.mlp_of(layer)
        names = architecture.names
        self.projections = [linear for mixer in mixers for linear in mixer.projections]
        self.sizes = [size for mixer in mixers for size in mixer.sizes]
        self.inputs = Stacked(self.projections) if mixers and "qkv" in passes else None
        self.needs_positions = any(isinstance(mixer.rope, RopeTable) for mixer in mixers)
        self.beside: Any = architecture.beside_of(layer)
        gates: list[Any] = [getattr(self.mlp, name, None) for name in names.linears]
        self.down: Any = gates.pop()
        self.gate_up = Stacked(gates) if "gate_up" in passes else None
        self.experts = ExpertsPlan(self.mlp, architecture.family) if "experts" in passes else None
        shared = None if self.experts is None else self.experts.stacked
        self._stacks = [stacked for stacked in (self.inputs, self.gate_up, shared) if stacked is not None]
        self.activation = activation_of(layer) if self.gate_up is not None else None
        self.fuses_norms = "norm" in passes
        self.norms: list[Any] = [getattr(layer, name) for name in names.norms]
        self.post_norms: list[Any] = [getattr(layer, name) for name in names.post_norms]
        self.multipliers = Multipliers(layer, architecture)
        self._look_up()

    # ------------------------------------------------------------------------------------------------ weights
    def _look_up(self) -> None:
        """The norms' weights and numbers, as options of the ops."""
        offset = self.architecture.norm_offset
        self.norm_options: list[dict[str, Any]] = [
            dict(zip(("norm_weight", "norm_eps", "norm_offset"), norm_of(norm, offset), strict=True))
            for norm in self.norms
        ]
        self.scales = self.multipliers.scales(len(self.mixers))

    def refresh(self) -> None:
        """After weights were moved or replaced by others of their kind."""
        for stacked in self._stacks:
            stacked.restack()
        self._look_up()
        for mixer in self.mixers:
            mixer.look_up()

    def separate(self) -> None:
        """Undo what the plan did to the weights."""
        for stacked in self._stacks:
            stacked.separate()

    # --------------------------------------------------------------------------------------- pieces of a step
    def cached(self, cache: Any) -> list[Any] | None:
        """What a fused step runs over: for each mixer the layer of ``cache``; without mixers the cache
        itself, once a layer before this one has chosen its backend. None: the step is no fused one."""
        if self.mixers:
            found = [mixer.cached(cache) for mixer in self.mixers]
            return None if any(each is None for each in found) else found
        owner = paged_owner(cache)
        return [owner] if owner is not None and owner.ready else None

    def begin(self, cached: list[Any], hidden_states: Tensor) -> BackendOps:
        """See `MixerPlan`."""
        if not self.mixers:
            ops: BackendOps = cached[0].backend.ops
            return ops
        pairs = zip(self.mixers, cached, strict=True)
        return [mixer.begin(each, hidden_states) for mixer, each in pairs][-1]

    def project(self, ops: BackendOps, x: Tensor) -> list[Sequence[Tensor]]:
        """What the projections of each mixer give of the layer's input, see `MixerPlan.mix`."""
        x, options = self.before(ops, x, 0, self.inputs)
        if self.inputs is None:
            parts = [part for mixer in self.mixers for part in mixer.project(x)]
            if self.scales.inputs is not None:
                each_by = self.scales.inputs.split(self.sizes)
                parts = [x.mul_(by) for x, by in zip(parts, each_by, strict=True)]
        else:
            whole = linear(ops, x, self.inputs, scale=self.scales.inputs, **options)
            parts = list(whole.split(self.sizes, dim=-1))
        each = iter(parts)
        return [[next(each) for _ in mixer.sizes] for mixer in self.mixers]

    def mix(self, steps: list[Step], parts: list[Sequence[Tensor]]) -> list[tuple[Tensor, dict[str, Any]]]:
        """See `MixerPlan.mixed`, for each mixer. The last one comes first, attention: the state's step behind
        it may run beside it."""
        each = list(zip(self.mixers, steps, parts, strict=True))
        if len(each) > 1:
            each = [(mixer, step._replace(reserved=mixer.reserve(step, x)), x) for mixer, step, x in each]
        return [mixer.mixed(step, x) for mixer, step, x in reversed(each)][::-1]

    def _normed(self, ops: BackendOps, x: Tensor, norm: Any, **options: Any) -> Tensor:
        return normed(ops, x, norm, self.architecture.norm_offset, **options)

    def before(
        self, ops: BackendOps, x: Tensor, number: int, stacked: Stacked | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The norm ahead of a block: an option of its linear if both are fused, else done here."""
        if not self.fuses_norms:
            return self.norms[number](x), {}
        if stacked is None:
            return self._normed(ops, x, self.norms[number]), {}
        return x, self.norm_options[number]

    def after(
        self,
        ops: BackendOps,
        x: Tensor,
        y: Tensor,
        number: int,
        last: Any,
        scale: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """``x +`` the block's last linear layer of ``y``, with ``options``, times ``scale``, with the norm in
        between where the family has one."""
        if not self.fuses_norms:
            return self._added(ops, x, last(y), number, scale)
        if not self.post_norms:
            return linear(ops, y, last, residual=x, scale=scale, **options)
        return self._added(ops, x, linear(ops, y, last, **options), number, scale)

    def _added(self, ops: BackendOps, x: Tensor, y: Tensor, number: int, scale: Tensor | None) -> Tensor:
        """``x +`` a block's output, normed or scaled where the family does."""
        if self.post_norms:
            norm = self.post_norms[number]
            return self._normed(ops, y, norm, post_residual=x) if self.fuses_norms else x + norm(y)
        return x + y if scale is None else torch.addcmul(x, y, scale, out=torch.empty_like(x))

    def feed(self, ops: BackendOps, x: Tensor, shape: tuple[int, int]) -> Tensor:
        """``x +`` the MLP of ``x``."""
        h, options = self.before(ops, x, -1, self.gate_up)
        if self.gate_up is not None:
            own = {"activation": self.activation, "scale": self.scales.gate_up}
            h = linear(ops, h, self.gate_up, self.down.in_features, **own, **options)
            return self.after(ops, x, h, -1, self.down, self.scales.down)
        if self.experts is not None and self.experts.takes(h):
            if self.experts.post_norm is None:
                return self.experts.run(ops, h, x)
            return self._normed(ops, self.experts.run(ops, h, None), self.experts.post_norm, post_residual=x)
        h = h.unflatten(0, shape)
        y = self.mlp(h)
        y = y[0] if isinstance(y, tuple) else y  # a mixture of experts also gives its router's scores
        if self.beside is not None:
            y = self.beside(h) + y
        # an MLP with multipliers has applied them
        scale = None if self.architecture.multiplied else self.scales.down
        return self._added(ops, x, y.flatten(0, 1), -1, scale)


def fused_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A decoder layer's forward: the step above if its cache is paged, else what the layer did before, in
    autocast, too: the ops take numbers of the weights' dtype."""
    plan: LayerPlan = self._torchpaged_plan
    kwargs |= dict(zip(plan.architecture.positional[: len(args)], args, strict=True))
    cache = take_cache(kwargs)
    cached = plan.cached(cache)
    lacks_positions = kwargs.get("position_ids") is None and plan.needs_positions
    if cached is None or lacks_positions or self.training or autocasts(hidden_states):
        if "position_embeddings" in kwargs:
            kwargs["position_embeddings"] = computed(kwargs["position_embeddings"])
        return type(self).forward(self, hidden_states, **{CACHE: cache}, **kwargs)
    beside = kwargs.pop("transformer_hidden_states", None)  # Zamba 2: mixed with the layer's input
    refuse_grad(hidden_states=hidden_states, transformer_hidden_states=beside)
    if torch.is_grad_enabled():  # weights, too, where what is ahead of the layer has no grad
        refuse_grad(**dict(self.named_parameters()))
    *shape, width = hidden_states.shape
    kwargs.pop("use_cache", None)
    rows = shape[0], shape[1]
    ops, x = plan.begin(cached, hidden_states), hidden_states.reshape(-1, width)
    names = ("position_ids", "position_embeddings", "attention_mask")
    given = (rows, *(kwargs.pop(name, None) for name in names), kwargs)
    steps = [Step(ops, each, *given) for each in cached[: len(plan.mixers)]]
    parts: list[Sequence[Tensor]] = []
    if plan.mixers:
        parts = plan.project(ops, x if beside is None else x + beside.reshape(-1, width))
    # Compiled layers share one graph, which must not ask which of them is the last, and hooks of the last one
    # see all tokens: the norm takes it then.
    keep = None if torch.compiler.is_compiling() or plan.ends is None or hooks_of(self) else plan.ends.take()
    if keep is not None:
        x, shape = x[keep], [1, keep.shape[0]]
    goes_on = keep is None or keep.shape[0] > 0
    for number, (mixed, norm) in enumerate(plan.mix(steps, parts)):
        mixer = plan.mixers[number]
        if not isinstance(cache, LayerCache):
            cached[number].complete()
        if keep is not None:
            mixed = mixed[keep]
        if goes_on:
            x = plan.after(ops, x, mixed, 0, mixer.output, plan.scales.outputs[number], **norm)
    if plan.mlp is not None and goes_on:
        x = plan.feed(ops, x, (shape[0], shape[1]))
    x = x.view(*shape, width)
    return (x, None) if plan.architecture.gives_weights else x
