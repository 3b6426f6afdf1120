"""A cache as one compiled decoder layer sees it."""

from typing import Any

from torch import Tensor

from torchpaged.hf.layer import PagedLayer


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
