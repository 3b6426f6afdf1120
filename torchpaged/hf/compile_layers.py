"""Regional compilation: the repeated decoder layer is compiled once, not the whole model; minutes become
seconds when cold.

    torchpaged.hf.fuse(model)                     # optional, first
    # before the engine or the graph runner is built, which then take compile=False
    torchpaged.hf.compile_layers(model)
    generator = Generator(model, compile=False)
    torchpaged.hf.uncompile_layers(model)         # as it was

Only decode steps over paged caches are compiled, once per batch size and kind of layer (a model that
alternates sliding and full attention has two). Embedding, final norm and lm_head run as they are. See
docs/compile.md for what makes layers share one compilation.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchpaged.compile.compile_cache import with_own_code
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.cache_argument import CACHE, cache_of, take_cache
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.model_classes import unwrapped
from torchpaged.hf.template import PackedHybridLayer

_MARK = "_torchpaged_compiled"

Forward = Callable[..., Any]


#: The compiled form of a layer's forward, by that and a batch's shape and dtype.
Compiler = Callable[[Forward, torch.Size, torch.dtype], Forward]


def _compiler(options: dict[str, Any]) -> Compiler:
    """Of the layers of one model, which share what they can. Each shape has code of its own, so that shapes
    don't share the compiler's recompile limit."""

    @functools.cache
    def compiled(forward: Forward, shape: torch.Size, dtype: torch.dtype) -> Forward:
        def layer_step(layer: nn.Module, hidden_states: Tensor, kwargs: dict[str, Any]) -> Any:
            return forward(layer, hidden_states, **kwargs)

        copy: Forward = with_own_code(layer_step, "layer_" + "x".join(str(size) for size in shape))
        return torch.compile(copy, fullgraph=True, dynamic=False, **options)

    return compiled


def _decodes(cache: Any, index: int, hidden_states: Tensor) -> PagedLayer | None:
    """The paged layer of a decode step, else None. A host decision from shapes and flags that a captured
    graph may keep."""
    layers = getattr(cache, "layers", None)
    layer = layers[index] if layers is not None and index < len(layers) else None
    if (
        not isinstance(layer, PagedLayer)
        or isinstance(layer, PackedHybridLayer)  # whose mixer looks its state up by the layer's index
        or not layer.is_initialized
        or not layer.owner.ready
        or layer.owner.dense
    ):
        return None
    batch, query_len = hidden_states.shape[:2]
    return layer if layer.owner.metadata_of(layer, batch, query_len).max_query_len == 1 else None


def _give_forward(layer: Any, index: int, compiler: Compiler) -> None:
    fused: Any = vars(layer).get("forward")  # what fuse() gave it, as a method
    plain: Forward = type(layer).forward if fused is None else fused.__func__

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cached = None if args or self.training else _decodes(cache_of(kwargs), index, hidden_states)
        if cached is None:
            return plain(self, hidden_states, *args, **kwargs)
        take_cache(kwargs)
        kwargs[CACHE] = LayerCache(cached)
        result = compiler(plain, hidden_states.shape, hidden_states.dtype)(self, hidden_states, kwargs)
        cached.complete()
        return result

    setattr(layer, _MARK, fused)
    layer.forward = types.MethodType(forward, layer)


def _index_of(model: PreTrainedModel, position: int, layer: nn.Module) -> int:
    """Which layer of the cache the decoder layer at ``position`` uses.

    Raises:
        UnsupportedModelError: none, or several; or accelerate moves its weights.
    """
    hooked = next((path for path, module in layer.named_modules() if hasattr(module, "_hf_hook")), None)
    if hooked is not None:
        where = f"layers.{position}.{hooked}".rstrip(".")
        raise UnsupportedModelError(
            f"{type(model).__name__}: {where} has a hook of accelerate (device_map, offloading), which "
            "compiled code can't run; load the model on one device"
        )
    named = (getattr(module, "layer_idx", None) for module in layer.modules())
    found = {index for index in named if isinstance(index, int)}
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__}: layers.{position} ({type(layer).__name__}) names {len(found)} "
            "layers of the cache, expected 1"
        )
    return found.pop()


def compile_layers(model: PreTrainedModel, **options: Any) -> int:
    """Compile the decoder layers of ``model`` at their first decode step over a paged cache.

    Args:
        model: a causal LM of transformers, or its base model; `fuse` it before, if at all.
        options: further arguments of ``torch.compile`` (``backend``, ``mode``, ``options``).

    Returns:
        How many layers were prepared.

    Raises:
        ArgumentError: they are prepared already.
        UnsupportedModelError: no decoder layers were found, or one does not say which layer of the cache is
            its own.
    """
    base: Any = unwrapped(model).get_decoder()
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no decoder layers that compile_layers() could find"
        )
    if any(hasattr(layer, _MARK) for layer in layers):
        raise ArgumentError(
            "model",
            "a model whose layers are not compiled",
            "one whose layers are",
            "call torchpaged.hf.uncompile_layers(model) first",
        )
    indices = [_index_of(model, position, layer) for position, layer in enumerate(layers)]
    compiler = _compiler(options)
    for layer, index in zip(layers, indices, strict=True):
        _give_forward(layer, index, compiler)
    return len(indices)


def uncompile_layers(model: PreTrainedModel) -> None:
    """Undo `compile_layers`.

    Raises:
        ArgumentError: the layers are not compiled.
    """
    base: Any = unwrapped(model).get_decoder()
    layers = [layer for layer in getattr(base, "layers", ()) if hasattr(layer, _MARK)]
    if not layers:
        raise ArgumentError("model", "a model whose layers are compiled", "one whose layers are not")
    for layer in layers:
        fused = getattr(layer, _MARK)
        delattr(layer, _MARK)
        if fused is None:
            del layer.forward
        else:
            layer.forward = fused


class LayerCache:
    """A cache as one decoder layer sees it: the layer's own pools, whatever index it names.

    A compiled layer that is given this instead of the whole cache does not depend on its index, so that all
    layers share the code.
    """

    def __init__(self, layer: PagedLayer) -> None:
        self.layer = layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """`PagedLayer.write`; ``layer_idx`` is not looked at. `compile_layers` completes the layer outside
        the compiled region."""
        return self.layer.write(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """`PagedLayer.get_seq_length`; ``layer_idx`` is not looked at."""
        return self.layer.get_seq_length()
