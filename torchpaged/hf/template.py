"""Which layers a cache needs, by HuggingFace's own word: a StaticCache is built from the config and its
layers swapped.

``StaticCache(config)`` knows every architecture's layer kinds (full, sliding, chunked, linear, hybrid); the
helper behind it changed its signature between transformers 5.17 and 5.23, the class did not.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticCache,
    StaticIndexedLayer,
    StaticLayer,
)

from torchpaged.cache.kinds import layer_kinds
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.families import family_of
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.packed_state import PackedState
from torchpaged.hf.state_layer import StateLayer


class HybridPagedLayer(StateLayer, PagedLayer):
    """A layer with both a linear-attention state and paged keys and values."""

    def __init__(
        self, owner: PagedOwner, index: int, window: int | None, chunk: int | None, number_of_states: int
    ) -> None:
        PagedLayer.__init__(self, owner, index, window, chunk)
        StateLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Keys and values come as positions, states by keyword."""
        if len(args) == 2 and not kwargs:
            PagedLayer.lazy_initialization(self, *args)
        elif not args and kwargs:
            StateLayer.lazy_initialization(self, **kwargs)

    def get_max_length(self) -> int:
        """`PagedLayer.get_max_length`: the state has no length."""
        return PagedLayer.get_max_length(self)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """A recurrent state can't be taken back."""
        return False


def window_and_chunk(config: Any, index: int, layer: Any) -> tuple[int | None, int | None]:
    """Sliding window and attention chunk of layer ``index``, in tokens."""
    if not getattr(layer, "is_sliding", False):
        return None, None
    types = getattr(config, "layer_types", None)
    kind = types[index] if types is not None and index < len(types) else None
    window = getattr(config, "sliding_window", None)
    if kind == "chunked_attention" or (kind is None and window is None):
        return None, config.attention_chunk_size
    return window, None


def _own_layer(owner: PagedOwner, index: int, config: Any, template: Any) -> PagedLayer | None:
    """The layer that a kind other than keys and values, or the model's family, makes of ``template``; None if
    neither takes it."""
    kinds = [kind.hf_layer for kind in layer_kinds() if kind.hf_layer is not None]
    makers = [*kinds, family_of(config.model_type).layer]
    made = (make(owner, index, config, template) for make in makers)
    return next((layer for layer in made if layer is not None), None)


def paged_layers(config: Any, max_seq_len: int, owner: PagedOwner) -> list[Any]:
    """The layers of a paged cache for ``config``: those of a registered kind or of the model's family their
    own, attention layers paged, linear ones a `StateLayer`.

    Raises:
        UnsupportedModelError: the architecture keeps something in its cache that can be neither.
    """
    layers: list[Any] = []
    try:
        with torch.device("meta"):
            template = StaticCache(config=config, max_cache_len=max_seq_len).layers
    except Exception as error:  # transformers has no cache of fixed size for it either
        raise UnsupportedModelError(
            f"{config.model_type}: transformers' StaticCache, from which the layers are read, can't be built "
            f"for it ({type(error).__name__}: {error}); use DynamicCache(config=model.config)"
        ) from error
    for index, layer in enumerate(template):
        window, chunk = window_and_chunk(config, index, layer)
        own = _own_layer(owner, index, config, layer)
        if own is not None:
            layers.append(own)
        elif isinstance(layer, StaticIndexedLayer):
            raise UnsupportedModelError(
                f"{config.model_type}: layer {index} caches an indexer (sparse attention), which is not "
                "supported yet"
            )
        elif isinstance(layer, LinearAttentionCacheLayerMixin) and isinstance(layer, StaticLayer):
            layers.append(HybridPagedLayer(owner, index, window, chunk, layer.number_of_states))
        elif isinstance(layer, StaticLayer):
            layers.append(PagedLayer(owner, index, window, chunk))
        elif type(layer) is LinearAttentionLayer:
            layers.append(StateLayer(layer.number_of_states))
        elif isinstance(layer, CacheLayerMixin):
            raise UnsupportedModelError(
                f"{config.model_type}: layer {index} needs a cache of its own kind ({type(layer).__name__})"
            )
        else:
            layers.append(layer)
    return layers


class PackedHybridLayer(HybridPagedLayer):
    """Pages keys and values, in its own pools, and keeps a state per request beside them, as the layers of
    Falcon-H1 and Zamba 2 do.

    Args:
        owner: the cache.
        index: position among the cache's layers.
        window: see `torchpaged.hf.layer.PagedLayer`.
        chunk: as above.

    Attributes:
        state: the `PackedState` that the layer's mixer calls.
    """

    def __init__(self, owner: PagedOwner, index: int, window: int | None, chunk: int | None) -> None:
        super().__init__(owner, index, window, chunk, 1)
        self.state = PackedState(owner, index)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """See `PackedState`."""
        return self.state.is_croppable

    def activate_past_recording(self) -> None:
        """See `PackedState`."""
        self.state.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """See `PackedState`; keys that rows do not reach are not read."""
        self.state.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See `PackedState`; blocks of keys are the rows'."""
        self.state.reorder_cache(beam_idx)

    def reset(self) -> None:
        """See `PackedState`."""
        self.state.reset()

    def update_conv_state(self, *_: Any, **__: Any) -> Tensor:
        """See `PackedState`; raises `UnsupportedModelError`."""
        raise self.state.unknown()

    update_recurrent_state = update_conv_state
