"""What a runner asks of tensors whose steps it captures whole: a launch runs several and ends each by itself.

How a step ends is theirs: the runner hands them what the step gave and knows nothing of it. `DecodeRows` are such tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from torchpaged.metadata import AttentionMetadata


class LaunchCount(Protocol):
    """Where a launch's results go, counted by host and device alike."""

    def check_room(self) -> None:
        """Raise unless there is a place for the next launch's results."""

    def begin(self) -> None:
        """Right before a launch."""

    def count(self) -> None:
        """After a launch was started."""


class WholeSteps(Protocol):
    """Static tensors of up to ``max_batch_size`` rows, ``steps_per_launch`` steps of which make a launch."""

    max_batch_size: int
    steps_per_launch: int
    tokens_out: Tensor
    semaphore: Tensor

    @property
    def ring(self) -> LaunchCount:
        """Where the results of launches go."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything a captured step reads or writes, by name."""

    def view(self, num_rows: int) -> tuple[Tensor, AttentionMetadata]:
        """The arguments of a step over the first ``num_rows`` rows: slices, no copies."""

    def finish_step(self, logits: Tensor, num_rows: int, step: int) -> None:
        """End step number ``step`` of a launch with what it gave; part of the graph."""

    def padding(self, num_rows: int) -> AbstractContextManager[None]:
        """The first ``num_rows`` rows are idle inside the block, for a warm-up or a capture."""

    def whole(self) -> AbstractContextManager[None]:
        """A launch whose steps run one by one: if it ends in an exception, the rows are as before it."""

    def reset(self) -> None:
        """Make host and device agree again after a launch or capture that failed."""
