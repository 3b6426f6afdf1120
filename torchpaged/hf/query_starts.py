"""The query starts of a forward of many tokens per row, behind which an attention may start early.

An attention kernel reads its query starts before the kernels ahead of it have ended
(custom_ops/stream_order.py), so that the kernel that writes them must not be the last one ahead of it. A
second kernel in between is seen to by an op: a compiler moves single kernels, and drops one that changes
nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Kept for the life of the process: dropping it deregisters the op.
_LIBRARY = torch.library.Library("torchpaged", "FRAGMENT")
_LIBRARY.define("_fill_query_starts(Tensor(a!) query_starts, Tensor row_starts, SymInt query_len) -> ()")


@torch.library.impl(_LIBRARY, "_fill_query_starts", "CompositeExplicitAutograd")
def _fill(query_starts: Tensor, row_starts: Tensor, query_len: int) -> None:
    torch.mul(row_starts, query_len, out=query_starts)
    _ = row_starts[:1] + 1  # the kernel in between


@torch.library.register_fake("torchpaged::_fill_query_starts", lib=_LIBRARY)
def _fake(query_starts: Tensor, row_starts: Tensor, query_len: int) -> None:
    return None


def fill_query_starts(query_starts: Tensor, row_starts: Tensor, query_len: int) -> None:
    """``query_starts = row_starts * query_len``, both ``[rows + 1]`` int32, and an ordinary kernel behind the
    one that writes them."""
    torch.ops.torchpaged._fill_query_starts(query_starts, row_starts, query_len)
