"""The left padding that was read for a forward which has not written yet, and whether a write belongs to
that forward.

Under generate() a mask is made twice in a prefill: by ``prepare_inputs_for_generation``, from the user's
mask, and in the forward, from None, or from ones in models that make a mask of their own where none came. A
forward that is called without a mask looks the same. What tells them apart is who asked: the caller of
``prepare_inputs_for_generation`` still runs while the forward that it prepared does.
"""

from __future__ import annotations

import inspect
from types import FrameType

from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError

_PREPARE = "prepare_inputs_for_generation"


def _stack() -> list[FrameType]:
    """The running functions, the innermost one first."""
    frames, frame = [], inspect.currentframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def preparing_caller() -> FrameType | None:
    """The caller of ``prepare_inputs_for_generation`` under which this runs; None if there is none."""
    stack = _stack()
    prepared = [i for i, frame in enumerate(stack[:-1]) if frame.f_code.co_name == _PREPARE]
    return stack[prepared[-1] + 1] if prepared else None


class PendingPadding:
    """What the masks of one forward say, until it writes.

    Args:
        name: the model's type, for messages.

    Attributes:
        padding: left padding of each row; None if there is none.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.forget()

    def __reduce__(self) -> tuple[type[PendingPadding], tuple[str]]:
        """A copy knows of no forward: a frame is of its own process and thread."""
        return PendingPadding, (self.name,)

    def forget(self) -> None:
        """Before another conversation, and once a forward wrote."""
        self.padding: list[int] | None = None
        self._shape: tuple[int, int] | None = None
        self._kinds: set[int | None] = set()
        self._by: FrameType | None = None  # the frame itself: its address may be another one's later

    def learn(self, padding: list[int], batch: int, query_length: int, local_size: int | None) -> None:
        """A mask came.

        Args:
            padding: of each row, in tokens; all zeros or empty: the mask says nothing.
            batch, query_length, local_size: the forward's rows and tokens per row, and the window or chunk,
                as the mask function gets them.

        Raises:
            UnsupportedModelError: the forward's masks contradict each other, or it is not as long as the one
                that was prepared.
        """
        found, by = (padding if any(padding) else None), preparing_caller()
        if by is None and self._by is not None and found is None:
            if self._shape == (batch, query_length):
                return  # from inside the forward that was prepared, or from another one: `take` sees which
            if self.padding is not None and self._shape is not None and self._is_running():
                raise UnsupportedModelError(
                    f"{self.name} runs {query_length} tokens per row where {self._shape[1]} were prepared, "
                    f"with left padding {self.padding}, so that it is not known which of them are padding; "
                    "generate without padding, row by row"
                )
        same_forward = (
            by is self._by and self._shape == (batch, query_length) and local_size not in self._kinds
        )
        if not same_forward:
            self.padding, self._shape, self._kinds, self._by = found, (batch, query_length), set(), by
        elif found != self.padding:
            raise UnsupportedModelError(
                f"{self.name} masks the padding of some layers and not, or not alike, that of others "
                f"({self.padding}, then {found}), which rows of one length can't hold; generate without "
                "padding, row by row"
            )
        self._kinds.add(local_size)

    def _is_running(self) -> bool:
        return any(frame is self._by for frame in _stack())

    def take(self) -> list[int] | None:
        """The padding of the forward that is about to write, which forgets it.

        Raises:
            ArgumentError: it was read for a forward that never wrote, and this one's masks said nothing; it
                is kept then.
        """
        if self.padding is not None and self._by is not None and not self._is_running():
            raise ArgumentError(
                "attention_mask",
                "the mask of the forward that runs",
                f"none, behind one with padding {self.padding} whose forward never wrote",
                "call cache.reset() before another prompt",
            )
        padding = self.padding
        self.forget()
        return padding
