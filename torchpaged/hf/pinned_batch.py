"""Tensors of a batch that are written inside a forward, behind which an attention may start early.

An attention kernel reads its metadata before the kernels ahead of it have ended (custom_ops/stream_order.py),
so that the kernel that writes them must not be the last one ahead of it. A second kernel in between is seen
to by an op: a compiler moves single kernels, and drops one that changes nothing.
"""

import torch
from torch import Tensor

# Kept for the life of the process: dropping it deregisters the op.
_LIBRARY = torch.library.Library("torchpaged", "FRAGMENT")
_LIBRARY.define(
    "_pin_batch(Tensor block_table, Tensor seq_lens, Tensor query_start_loc) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define("_fill_query_starts(Tensor(a!) query_starts, Tensor row_starts, SymInt query_len) -> ()")


@torch.library.impl(_LIBRARY, "_pin_batch", "CompositeExplicitAutograd")
def _pin(block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tensors = block_table, seq_lens, query_start_loc
    pinned = tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors)
    _ = pinned[2][:1] + 1  # the kernel in between
    table, lens, starts = pinned
    return table, lens, starts


@torch.library.register_fake("torchpaged::_pin_batch", lib=_LIBRARY)
def _fake(block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(block_table, memory_format=torch.contiguous_format),
        torch.empty_like(seq_lens, memory_format=torch.contiguous_format),
        torch.empty_like(query_start_loc, memory_format=torch.contiguous_format),
    )


def pin_batch(
    block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of a batch's tensors, and an ordinary kernel behind those that write them.

    Args:
        block_table: ``[num_reqs, max_blocks_per_req]`` int32.
        seq_lens: ``[num_reqs]`` int32.
        query_start_loc: ``[num_reqs + 1]`` int32.
    """
    table, lens, starts = torch.ops.torchpaged._pin_batch(block_table, seq_lens, query_start_loc)
    return table, lens, starts


@torch.library.impl(_LIBRARY, "_fill_query_starts", "CompositeExplicitAutograd")
def _fill(query_starts: Tensor, row_starts: Tensor, query_len: int) -> None:
    torch.mul(row_starts, query_len, out=query_starts)
    _ = row_starts[:1] + 1  # the kernel in between


@torch.library.register_fake("torchpaged::_fill_query_starts", lib=_LIBRARY)
def _fake_fill(query_starts: Tensor, row_starts: Tensor, query_len: int) -> None:
    return None


def fill_query_starts(query_starts: Tensor, row_starts: Tensor, query_len: int) -> None:
    """``query_starts = row_starts * query_len``, both ``[rows + 1]`` int32, and an ordinary kernel behind the
    one that writes them."""
    torch.ops.torchpaged._fill_query_starts(query_starts, row_starts, query_len)
