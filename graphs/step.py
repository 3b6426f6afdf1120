"""The step of a runner: its type, one copy of it per bucket for the compiler, and the ranges around it.

compiled = torch.compile(bucket_step(step, 8), fullgraph=True, dynamic=False)
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from torchpaged.metadata import AttentionMetadata

Step = Callable[[Tensor, AttentionMetadata], Tensor]
Ranges = Callable[..., AbstractContextManager[None]]

_NO_RANGE: AbstractContextManager[None] = nullcontext()


def no_range(name: str, **payload: object) -> AbstractContextManager[None]:
    """Ranges for nobody: one object, which does nothing."""
    return _NO_RANGE


def bucket_step(step: Step, bucket: int) -> Step:
    """``step`` as a function with a code object of its own.

    Dynamo keeps its compiled entries, and counts its recompile limit, per code object: shared by all buckets, the limit of 8
    would end the ninth.
    """

    def bucket_step(input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        return step(input_ids, metadata)

    code = bucket_step.__code__.replace(co_name=f"decode_{bucket}")
    return types.FunctionType(code, bucket_step.__globals__, code.co_name, None, bucket_step.__closure__)
