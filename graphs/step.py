"""The decode step of a runner: its type, one copy of it per bucket for the compiler, the ranges around it,
and what its backend keeps.

steps = decode_steps(step, [1, 2, 4], compile=True, capture=capture)
logits = steps(4)(input_ids, metadata)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from torchpaged.compile.code_object import with_own_code
from torchpaged.custom_ops.checks import switch
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.graphs.capture import CaptureBackend, TapeCapture
from torchpaged.metadata import AttentionMetadata, HostLengths

Step = Callable[[Tensor, AttentionMetadata], Tensor]
Ranges = Callable[..., AbstractContextManager[None]]

_NO_RANGE: AbstractContextManager[None] = nullcontext()


class StepSession(Protocol):
    """What a runner drives of the session that its step's layers share: a `torchpaged.Session`, or anything
    like it."""

    @property
    def plans(self) -> bool:
        """Whether a capture needs `plan`."""

    @property
    def plans_every_step(self) -> bool:
        """Whether every replay needs `plan`."""

    def require_graphs(self, max_query_len: int) -> None:
        """Raise if graphs of steps with up to so many query tokens per request are beyond its backend."""

    @property
    def plans_every_decode(self) -> bool:
        """Whether a replay of one query token per request does."""

    def plan(self, batch: AttentionMetadata, host: HostLengths | None = None) -> None:
        """Plan the next step."""

    def tensors(self) -> Mapping[str, Tensor]:
        """What a captured step reads or writes, by name."""

    def reset(self) -> None:
        """Make it as new after a step that was cut short."""

    def check(self, launch: str) -> None:
        """In debug mode, behind ``launch``: raise if its results are wrong."""


class NoSession:
    """The session of steps that keep nothing, or whose layers have sessions of their own that need
    no plan."""

    plans = plans_every_step = plans_every_decode = False

    def require_graphs(self, max_query_len: int) -> None:
        """Nothing is known to refuse."""

    def plan(self, batch: AttentionMetadata, host: HostLengths | None = None) -> None:
        """Nothing to plan."""

    def tensors(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def reset(self) -> None:
        """Nothing to clear."""

    def check(self, launch: str) -> None:
        """Nothing to look at."""


def no_range(name: str, **payload: object) -> AbstractContextManager[None]:
    """Ranges that are off: one object, which does nothing."""
    return _NO_RANGE


def decode_steps(
    step: Step, buckets: Sequence[int], compile: bool, capture: str | CaptureBackend
) -> Callable[[int], Step]:
    """``step`` for each bucket.

    Args:
        step: ``step(input_ids, metadata)``.
        buckets: batch sizes.
        compile: run it through ``torch.compile(fullgraph=True)``. Shapes are static per bucket: one compile a
            bucket, none per length, and kernels tuned to the size. (One dynamic compile for all would fail on
            models that branch on sizes.)
        capture: what it will be captured with.

    Raises:
        ArgumentError: compiled steps on a tape.
    """
    switch("compile", compile)
    if not compile:
        return lambda bucket: step
    if isinstance(capture, TapeCapture):
        raise ArgumentError(
            "compile",
            "False with a TapeCapture",
            "True",
            "the tape can't see the kernels that Inductor generates",
        )
    compiled: dict[int, Step] = {
        n: torch.compile(_own_code(step, n), fullgraph=True, dynamic=False) for n in buckets
    }
    return compiled.__getitem__


def _own_code(step: Step, bucket: int) -> Step:
    """``step`` for one bucket alone, so that buckets don't share the compiler's recompile limit."""

    def call(input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        return step(input_ids, metadata)

    copy: Step = with_own_code(call, f"decode_{bucket}")
    return copy
