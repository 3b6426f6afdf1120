"""What runners are given: a decode step, one copy of it per bucket for the compiler, what its backend keeps,
the ranges around it, and its static inputs.

steps = decode_steps(step, [1, 2, 4], compile=True, capture=capture)
logits = steps(4)(input_ids, metadata)"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from torchpaged.compile.compile_cache import with_own_code
from torchpaged.custom_ops.checks import switch
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.graphs.capture import CaptureBackend, TapeCapture
from torchpaged.metadata import AttentionMetadata, HostLengths

Step = Callable[[Tensor, AttentionMetadata], Tensor]
Ranges = Callable[..., AbstractContextManager[None]]

_NO_RANGE: AbstractContextManager[None] = nullcontext()


class StepSession(Protocol):
    """What a runner drives of the session that its step's layers share: a `torchpaged.Session`, or anything
    like it. The bodies here are those of `NoSession`."""

    @property
    def plans(self) -> bool:
        """Whether a capture needs `plan`."""
        return False

    @property
    def plans_every_step(self) -> bool:
        """Whether every replay needs `plan`."""
        return False

    @property
    def plans_every_decode(self) -> bool:
        """Whether a replay of one query token per request does."""
        return False

    def require_graphs(self, max_query_len: int) -> None:
        """Raise if graphs of steps with up to so many query tokens per request are beyond its backend."""
        return None

    def plan(self, batch: AttentionMetadata, host: HostLengths | None = None) -> None:
        """Plan the next step."""
        return None

    def tensors(self) -> Mapping[str, Tensor]:
        """What a captured step reads or writes, by name."""
        return {}

    def reset(self) -> None:
        """Forget what an interrupted step left behind."""
        return None

    def check(self, launch: str) -> None:
        """In debug mode, behind ``launch``: raise if its results are wrong."""
        return None


class NoSession(StepSession):
    """The session of steps that keep nothing, or whose layers have sessions of their own that need
    no plan."""


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

    def call(input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        return step(input_ids, metadata)

    # Code of its own for each bucket, so that buckets don't share the compiler's recompile limit.
    compiled: dict[int, Step] = {
        n: torch.compile(with_own_code(call, f"decode_{n}"), fullgraph=True, dynamic=False) for n in buckets
    }
    return compiled.__getitem__


class StaticInputs(Protocol):
    """Tensors that never move, of up to as many rows as the largest bucket."""

    def tensors(self) -> Mapping[str, Tensor]:
        """All of them by name."""

    def view(self, bucket: int, /) -> tuple[Any, ...]:
        """The arguments of a step over ``bucket`` rows: slices, no copies. The second one is the batch, which
        a session plans."""

    def padding(self, bucket: int, /) -> AbstractContextManager[None]:
        """The first ``bucket`` rows are padding inside the block: a step over them writes nothing into
        a cache."""

    def reset(self) -> None:
        """Wait for the device, and make host and device agree, after a capture or replay that failed or
        was interrupted."""
