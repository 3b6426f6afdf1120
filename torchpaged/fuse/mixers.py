"""The base of what mixes the tokens of a fused layer: attention_layers.py, latent_layers.py and
state_layers.py have the kinds."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops import BackendOps
from torchpaged.fuse.architectures import Architecture, Mixer
from torchpaged.fuse.fusible import norm_of
from torchpaged.fuse.rope_table import RopeTable
from torchpaged.hf.compile_layers import LayerCache
from torchpaged.hf.layer import PagedLayer

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


class Step(NamedTuple):
    """One forward of a layer over its paged cache.

    ``ops``: the backend's. ``cached``: the layer of the cache. ``shape``: ``(batch, query_len)``.
    ``position_ids``, ``rotary``, ``mask``, ``options``: what the layer was given, positions where it rotates;
    ``rotary``: cosines and sines, or the module that computes them, or None. ``reserved``: what
    `MixerPlan.reserve` gave, of a mixer that runs behind another over the same input.
    """

    ops: BackendOps
    cached: Any
    shape: tuple[int, int]
    position_ids: Any
    rotary: Any
    mask: Tensor | None
    options: dict[str, Any]
    reserved: Any = None


def linear(ops: BackendOps, x: Tensor, layer: Any, width: int | None = None, **options: Any) -> Tensor:
    """``[T, width]`` of the op ``linear`` by weight and bias of ``layer``; default: all its rows."""
    out = x.new_empty(x.shape[0], layer.weight.shape[0] if width is None else width)
    ops.linear(x, layer.weight, out, bias=layer.bias, **options)
    return out


def normed(ops: BackendOps, x: Tensor, norm: Any, offset: float = 0.0, **options: Any) -> Tensor:
    """``x [T, *]`` by the op ``rms_norm`` of a norm's weight, to which ``offset`` is added, and eps."""
    weight, eps, offset = norm_of(norm, offset)
    out = torch.empty_like(x)
    ops.rms_norm(x, weight, out, eps=eps, offset=offset, **options)
    return out


class MixerPlan:
    """What one mixer of a fused layer uses.

    Args:
        architecture: of the layer.
        layer: the decoder layer; `fusible.why_unknown` found nothing.
        mixer: which of its parts.
        passes: the passes that apply to the layer.
        rope: the layer's table, NO_ROTATION, or None = rotate as the model does.
    """

    #: How many of the first projections `mix` gets as one tensor.
    joined = 1

    def __init__(
        self,
        architecture: Architecture,
        layer: Any,
        mixer: Mixer,
        passes: Sequence[str],
        rope: RopeTable | str | None,
    ) -> None:
        self.architecture, self.rope, self.fuses_norms = architecture, rope, "norm" in passes
        self.mixer: Any = getattr(layer, mixer.name)
        self.layer_idx: int = self.mixer.layer_idx
        self.projections: list[Any] = [self.mixer.get_submodule(path) for path in mixer.inputs]
        self.output: Any = self.mixer.get_submodule(mixer.output)
        self.plan()
        self.look_up()

    # ---------------------------------------------------------------------------------- what a subclass has
    def plan(self) -> None:
        """The constants of the mixer."""

    def look_up(self) -> None:
        """Weights of its norms; again after weights were moved or replaced."""

    def cached(self, cache: Any) -> Any:
        """The layer of ``cache`` that a fused step runs over, or None."""
        return paged_layer(cache, self.layer_idx)

    def begin(self, cached: Any, hidden_states: Tensor) -> BackendOps:
        """Before the first op of a step over ``hidden_states [batch, query_len, *]``: pools and a backend are
        made where there are none. The ops."""
        raise NotImplementedError

    def reserve(self, step: Step, parts: Sequence[Tensor]) -> Any:
        """Before the layer's other mixers run: what `mixed` needs to run beside them, such as memory that
        they do not use."""
        return None

    def mix(self, step: Step, parts: Sequence[Tensor]) -> Tensor:
        """What the tokens are mixed to, ``[T, *]``, before ``output``; writes to the cache. ``parts``: what
        the projections give of the layer's input, ``[T, *]`` each."""
        raise NotImplementedError

    def mixed(self, step: Step, parts: Sequence[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """`mix`, and options of the ``linear`` behind it: a norm's that is left to it."""
        return self.mix(step, parts), {}

    # --------------------------------------------------------------------------------- of the layer's product
    @property
    def sizes(self) -> list[int]:
        """Columns of the ``parts`` that `mix` gets."""
        sizes = [linear.out_features for linear in self.projections]
        return [sum(sizes[: self.joined]), *sizes[self.joined :]]

    def project(self, x: Tensor) -> list[Tensor]:
        """Those parts, where the layer has no product of all its projections."""
        parts = [linear(x) for linear in self.projections]
        return parts if self.joined == 1 else [torch.cat(parts[: self.joined], -1), *parts[self.joined :]]
