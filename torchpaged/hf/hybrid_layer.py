"""PackedHybridLayer: a layer of a paged cache that pages keys and values and keeps a state per request beside
them, as the layers of Falcon-H1 and Zamba 2 do."""

from typing import Any

from torch import Tensor

from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.packed_state import PackedState
from torchpaged.hf.template import HybridPagedLayer


class PackedHybridLayer(HybridPagedLayer):
    """Its own pools are of keys and values.

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
