"""The step of a runner: its type, one copy of it per bucket for the compiler, and the ranges around it.

compiled = torch.compile(bucket_step(step, 8), fullgraph=True, dynamic=False)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from torchpaged.code_object import with_own_code
from torchpaged.metadata import AttentionMetadata

Step = Callable[[Tensor, AttentionMetadata], Tensor]
Ranges = Callable[..., AbstractContextManager[None]]

_NO_RANGE: AbstractContextManager[None] = nullcontext()


def no_range(name: str, **payload: object) -> AbstractContextManager[None]:
    """Ranges for nobody: one object, which does nothing."""
    return _NO_RANGE


def bucket_step(step: Step, bucket: int) -> Step:
    """``step`` for one bucket alone, so that buckets don't share the compiler's recompile limit."""

    def call(input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        return step(input_ids, metadata)

    copy: Step = with_own_code(call, f"decode_{bucket}")
    return copy
