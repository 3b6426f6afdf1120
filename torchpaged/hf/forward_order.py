"""In which order the layers of a cache write: which moves the step on, which completes it, which has not
written yet, which writes twice.

Which layers are the first and the last is seen, not assumed: a config may list layers that never write
(recurrent ones, shared ones).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.row_table import incomplete

if TYPE_CHECKING:
    from torchpaged.hf.layer import PagedLayer
    from torchpaged.hf.packed_state import PackedState

    Writer = PagedLayer | PackedState


#: What to do about a decoder that attends to an encoder, too.
TWO_CACHES = (
    "pass past_key_values=PagedEncoderDecoderCache.for_inputs(model, **call), or EncoderDecoderCache("
    "PagedCache(...), DynamicCache(config=model.config))"
)


class ForwardOrder:
    """The order of one cache's layers.

    Args:
        name: the model's type, for messages.
        layers: those that write keys or states; until a forward has shown which writes first, the first of
            them is taken for it.
        has_cross_attention: the model's config says that it attends to an encoder too.

    Attributes:
        last: the layer that wrote last; None before the first forward.
        query_len: tokens per row of the forward that runs, or ran last.
        announced: tokens per row that the model asked a mask for and has not written yet; None = no mask was
            asked for.
        masks_asked: the model builds its masks from this cache's sizes.
    """

    def __init__(self, name: str, layers: "Sequence[Writer]", has_cross_attention: bool) -> None:
        self.name, self.has_cross_attention = name, has_cross_attention
        self._layers, self._seen = layers, False
        self._completes: Writer | None = None
        self.last: Writer | None = None
        self.query_len = 0
        self.announced: int | None = None
        self.masks_asked = False
        if layers:
            layers[0].is_first = True

    def reset(self) -> None:
        """Before another conversation; which layer is the first stays known."""
        self.last, self.query_len, self.announced = None, 0, None

    def use(self, layer: "Writer", num_forwards: int = 0) -> None:
        """``layer`` gets its pools, or writes for the first time, in the ``num_forwards``-th forward since
        the last reset. The one that did so last completes a forward.

        Raises:
            ArgumentError: behind the first forward, which was then incomplete: it did not reach the layer.
        """
        if num_forwards > 1:
            if self._completes is not None and layer.index <= self._completes.index:
                return  # compiled code wrote it so far
            raise incomplete()
        if self._completes is not None:
            self._completes.is_last = False
        self._completes, layer.is_last = layer, True

    def announce(self, query_length: int) -> None:
        """The model asks for a mask over ``query_length`` new tokens per row."""
        if not torch.compiler.is_compiling():
            self.announced = query_length
        if not self.masks_asked:
            self.masks_asked = True

    def require_masks_asked(self) -> None:
        """Dense keys reach to ``max_seq_len``; without a mask made to that length, what lies behind the last
        token would be seen.

        Raises:
            UnsupportedModelError: the model attends without asking this cache for its sizes, as cross
                attention does.
        """
        if not self.masks_asked:
            raise UnsupportedModelError(
                f"{self.name} builds no mask from the sizes of this dense cache, as in cross attention or "
                "where a 4-D mask came: the keys behind the last token would be seen; for cross attention "
                "pass EncoderDecoderCache(PagedCache(...), DynamicCache(config=model.config)), for a mask "
                "of your own DynamicCache(config=model.config)"
            )

    def enter(self, layer: "Writer", query_len: int, traced: bool) -> None:
        """``layer`` is about to write ``query_len`` tokens per row.

        Raises:
            UnsupportedModelError: it wrote in this forward already, or the first layer is not known.
        """
        if not self._seen and traced:
            if self.last is None and not layer.is_first:
                raise UnsupportedModelError(
                    f"{self.name}: the first forward was compiled, and layer {layer.index} writes before "
                    "layer 0; run it eagerly"
                )
            # With pools made ahead: as far as the trace has come, this one completes the forward.
            self.use(layer)
        if traced:
            return
        if not self._seen and self.last is None:  # else compiled code began, and with the one taken for it
            for other in self._layers:
                other.is_first = other is layer
        self._seen = True
        if layer.is_first or layer is self.last:
            self._require_first_write(layer, query_len)

    def leave(self, layer: "Writer", query_len: int, traced: bool) -> None:
        """``layer`` writes: nothing refused it, and if it is the first one, it moved the lengths on."""
        if layer.is_first:
            self.query_len = query_len
        if not traced:
            layer.has_written = True
            if layer.is_first:
                self.announced = None
        self.last = layer

    def _require_first_write(self, layer: "Writer", query_len: int) -> None:
        twice = layer is self.last and not layer.is_first
        if self.has_cross_attention and self.masks_asked and layer.is_first:
            twice = layer is self.last if self.announced is None else self.announced != query_len
        if twice:
            raise UnsupportedModelError(
                f"{self.name}: layer {layer.index} writes twice in one forward, as a decoder does that keeps "
                f"its cross-attention's keys in the same cache; {TWO_CACHES}"
            )

    def is_behind(self, layer: "Writer") -> bool:
        """Whether the forward that runs has moved the lengths on, and ``layer`` has not written its
        tokens yet."""
        return self.last is not None and not layer.is_first and self.last.index < layer.index
