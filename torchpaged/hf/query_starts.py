"""Tensors of a batch that are written inside a forward, behind which an attention starts early: it reads its
metadata before the kernels ahead of it have ended (docs/stream_order.md), so that the kernel that writes them
must not be the last one ahead of it. A second kernel in between is seen to by an op: a compiler moves single
kernels, and drops one that changes nothing."""

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.limits import MAX_DECODE_QUERY_LEN

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


class QueryStarts:
    """The query starts of rows that have one number of tokens in a forward.

    Those of short forwards, by tokens per row, are made once: attention reads them before the kernels ahead
    have ended, so that none may write them right in front of it, in compiled code either.

    Args:
        max_rows: rows at most.
        device: of the tensors.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        # an inference tensor could not be written under no_grad later; short ones are rows of whole 16 bytes
        with torch.inference_mode(False):
            counts, starts = (
                torch.arange(n, dtype=torch.int32, device=device)
                for n in (MAX_DECODE_QUERY_LEN + 1, -(-(max_rows + 1) // 4) * 4)
            )
            self._short, self._long = counts[:, None] * starts[None], torch.zeros_like(starts[: max_rows + 1])
        for tensor in (self._short, self._long):  # guard=False: a new cache must not recompile the model
            torch._dynamo.mark_static_address(tensor, guard=False)

    def of(self, batch: int, query_len: int) -> Tensor:
        """Of ``batch`` rows of ``query_len`` tokens each, ``[batch + 1]`` int32; those of long forwards are
        what `fill` was told last."""
        starts = self._short[query_len] if query_len <= MAX_DECODE_QUERY_LEN else self._long
        return starts[: batch + 1]

    def fill(self, query_len: int, short: bool = False) -> None:
        """Write those of a forward of more than a few tokens per row, and an ordinary kernel behind the one
        that writes them; short ones have theirs. ``short``: of such, too, as kernels behind others that
        attention must not overtake."""
        if short or query_len > MAX_DECODE_QUERY_LEN:
            row_starts = self._short[1, : len(self._long)]
            torch.ops.torchpaged._fill_query_starts(self._long, row_starts, query_len)
