"""The left padding that masks tell of a forward whose rows are still to be made."""

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.call_mask import MaskRequest


def left_padding(mask: Tensor, todo: str = "") -> list[int]:
    """Padding tokens at the start of each row of a 2-D mask ``[batch, length]`` (nonzero = token).

    ``todo``: what to do about a hole, for the message.

    Raises:
        ArgumentError: a hole after the first token: right padding, or padding in the middle.
    """
    if mask.dim() != 2:
        raise ArgumentError(
            "attention_mask", "a 2-D mask [batch, length] with a PagedCache", f"shape {list(mask.shape)}"
        )
    present = mask.bool().cpu()
    padding = (present.cumsum(-1) == 0).sum(-1)
    holes = ~present & (torch.arange(mask.shape[1], device="cpu")[None] >= padding[:, None])
    if bool(holes.any()):
        row, column = holes.nonzero()[0].tolist()
        raise ArgumentError(
            "attention_mask",
            "left padding only (tokenizer.padding_side = 'left')",
            f"a zero after row {row}'s first token, at position {column}",
            todo,
        )
    return [int(p) for p in padding]


class ExpectedPadding:
    """What the masks of a forward that has no rows yet say of its padding.

    Args:
        name: the model's type, for messages.

    Attributes:
        padding: tokens of each row; None: there is none.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.forget()

    def forget(self) -> None:
        """Before another forward."""
        self.padding: list[int] | None = None
        self._shape: tuple[int, int] | None = None  # rows, and tokens per row
        self._asked: set[int | None] = set()  # windows or chunks that the forward asked masks for

    def forget_another_forward(self, asked: MaskRequest) -> None:
        """Forget the padding of a forward that broke off before it wrote, ahead of this one's first mask:
        transformers asks for those of windows and chunks in any order."""
        if self._shape != (asked.batch, asked.query_len) or asked.local_size in self._asked:
            self.forget()

    def learn(self, padding: list[int], asked: MaskRequest) -> None:
        """A mask with ``padding`` of each row; all zeros or empty: it says nothing.

        Raises:
            UnsupportedModelError: the forward's masks contradict each other.
        """
        found, shape = (padding if any(padding) else None), (asked.batch, asked.query_len)
        if self._shape is None:
            self.padding, self._shape = found, shape
        elif found != self.padding:
            raise UnsupportedModelError(
                f"{self._name} masks the padding of some layers and not, or not alike, that of others "
                f"({self.padding}, then {found}), which rows of one length can't hold; generate without "
                "padding, row by row"
            )
        self._asked.add(asked.local_size)

    def take(self, batch: int, query_len: int) -> list[int] | None:
        """Return, and forget, the padding of each row of the forward that is about to write its first tokens;
        None: there is none. ``query_len`` 0: the rows are made ahead of the forward.

        Raises:
            UnsupportedModelError: its masks were asked for as for a forward of another size.
        """
        padding, shape = self.padding, self._shape
        self.forget()
        if padding is not None and shape is not None and query_len and shape != (batch, query_len):
            raise UnsupportedModelError(
                f"{self._name} runs {query_len} tokens per row where {shape[1]} were prepared, in {batch} "
                f"rows where there were {shape[0]}, with left padding {padding}, so that it is not known "
                "which of them are padding; generate without padding, row by row"
            )
        return padding
