"""What a mask is made of: kinds that attention applies by itself, spans, and where a forward has queries."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.mask import Mask

#: Window and chunk of a layer, in tokens; None = off.
Size = tuple[int | None, int | None]
#: Of each row the spans as ``(first, end)``, positions with padding; never of one token alone.
Rows = tuple[tuple[tuple[int, int], ...], ...]


class MaskKind(NamedTuple):
    """A mask that attention applies by itself. ``window``: tokens visible, the own one included, before a
    query, and where it is not causal as many behind it; ``chunk`` in tokens; None = off."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None

    @property
    def sides(self) -> tuple[int, int]:
        """The window as ops have it: keys visible on the left and on the right; -1 = open."""
        left = -1 if self.window is None else self.window - 1
        return left, -1 if self.causal else left

    def near(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether window and chunk let ``query`` see ``key``; positions without padding."""
        if self.window == 0:  # what some configs make of a window that no layer uses: nothing is seen
            return torch.zeros_like(query == key)
        return Mask(False, *self.sides, self.chunk or 0).sees(query, key)


class Spans(NamedTuple):
    """The spans of a forward, for layers of one kind.

    Attributes:
        rows: where they are; empty: there are none.
        windowed: whether the layer's window hides keys from a span's queries, too.
    """

    rows: Rows = ()
    windowed: bool = True


class Prompt(NamedTuple):
    """Where the queries of a forward stand; positions count padding.

    Attributes:
        rows: of the batch.
        first: the position of each row's first query.
        length: queries per row.
        padding: of each row; empty: none.
        device: where the tensors lie that a mask function may look into.
    """

    rows: int
    first: int
    length: int
    padding: Sequence[int] = ()
    device: torch.device | str = "cpu"

    @property
    def end(self) -> int:
        """The position behind the last query."""
        return self.first + self.length
