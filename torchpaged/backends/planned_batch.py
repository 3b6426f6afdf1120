"""A batch as a library's plan needs it, in tensors that never move: copies to compare with, lengths without
surprises, hidden rows.

    planned = PlannedBatchBuffers(limits, device)
    planned.write(batch)                                # once per step, outside traces and graphs; waits for
    nothing planned.check(seq_lens, block_table, starts)        # in the op, on the device planned.finish(out,
    lse, y, y_lse, sinks)           # in the op: what the library gave, as the contract has it
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.backends.session import Limits, PlannedBatch, assert_planned


class PlannedBatchBuffers:
    """The tensors of the largest batch.

    Args:
        limits: with ``max_num_reqs``, ``max_num_tokens``, ``max_blocks_per_req`` and ``block_size``.
        device: where the batches are.

    Attributes:
        lens: ``[max_num_reqs]`` int32, keys of each request, 0 where the batch has a negative number or no
            request.
        table: ``[max_num_reqs, max_blocks_per_req]`` int32, blocks in use; 0 elsewhere, so that nobody can
            follow garbage.
        starts: ``[max_num_reqs + 1]`` int32, as the batch's ``query_start_loc``; the tail repeats its last
            value.
        hidden: ``[max_num_tokens]`` bool: padding, and queries before their sequence's first token. They see
            nothing.

    Raises:
        ArgumentError: one of the limits was not said.
    """

    def __init__(self, limits: Limits, device: torch.device) -> None:
        rows, tokens, width, self.block_size = limits.need(
            "max_num_reqs", "max_num_tokens", "max_blocks_per_req", "block_size"
        )
        ints = {"dtype": torch.int32, "device": device}
        with torch.inference_mode(False):
            self._raw_lens = torch.full((rows,), -1, **ints)
            self._raw_table = torch.zeros(rows, width, **ints)
            self.lens, self.table = torch.zeros(rows, **ints), torch.zeros(rows, width, **ints)
            self.starts = torch.full((rows + 1,), -1, **ints)
            self.hidden = torch.ones(tokens, dtype=torch.bool, device=device)
        for tensor in self.tensors().values():
            torch._dynamo.mark_static_address(tensor, guard=False)

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by name."""
        return {name.lstrip("_"): tensor for name, tensor in vars(self).items() if isinstance(tensor, Tensor)}

    def write(self, batch: PlannedBatch) -> None:
        """Take over a batch."""
        rows, width = batch.block_table.shape
        with torch.inference_mode():
            self._raw_lens[:rows].copy_(batch.seq_lens)
            self._raw_table[:rows, :width].copy_(batch.block_table)
            self.starts[: rows + 1].copy_(batch.query_start_loc)
            self.starts[rows + 1 :] = self.starts[rows]
            self.lens.zero_()
            self.lens[:rows].copy_(batch.seq_lens.clamp_min(0))
            self.table.zero_()
            self.table[:rows, :width].copy_(blocks_in_use(batch.block_table, batch.seq_lens, self.block_size))
            self.hidden.copy_(hidden_queries(batch.seq_lens, batch.query_start_loc, len(self.hidden)))

    def check(self, seq_lens: Tensor, block_table: Tensor, query_start_loc: Tensor) -> None:
        """On the device: the batch of a call is the one that was planned.

        Raises:
            RuntimeError: it is not; on a GPU a device-side assertion.
        """
        assert_planned(
            (self._raw_lens, self._raw_table, self.starts), (seq_lens, block_table, query_start_loc)
        )

    def finish(
        self, out: Tensor, lse: Tensor | None, y: Tensor, y_lse: Tensor | None, sinks: Tensor | None = None
    ) -> None:
        """`finish` with the hidden rows of the planned batch."""
        finish(self.hidden[: len(out)], out, lse, y, y_lse, sinks)


def blocks_in_use(block_table: Tensor, seq_lens: Tensor, block_size: int) -> Tensor:
    """The block table ``[B, width]`` int32 with 0 in place of whatever stands behind a request's last
    block."""
    column = torch.arange(block_table.shape[1], device=block_table.device) * block_size
    return torch.where(column < seq_lens[:, None], block_table, 0)


def hidden_queries(seq_lens: Tensor, query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """Which of the packed queries see nothing, ``[num_tokens]`` bool: padding, and left padding.

    Args:
        seq_lens: ``[B]`` int32, at least one.
        query_start_loc: ``[B + 1]`` int32.
        num_tokens: padding included.
    """
    token, rows = torch.arange(num_tokens, device=seq_lens.device), seq_lens.shape[0]
    ends = query_start_loc[1:].long()
    owner = torch.searchsorted(ends, token, right=True)
    position = (seq_lens.long() - ends)[owner.clamp_max(rows - 1)] + token
    return (owner >= rows) | (position < 0)


def finish(
    hidden: Tensor,
    out: Tensor,
    lse: Tensor | None,
    y: Tensor,
    y_lse: Tensor | None,
    sinks: Tensor | None = None,
) -> None:
    """Write a library's result as the contract has it: hidden rows are zeros and -inf, sinks take part in the
    softmax.

    Args:
        hidden: ``[T]`` bool.
        out: ``[T, H, head_dim_v]``, written.
        lse: ``[T, H]`` float32, written; or None.
        y: ``[T, H, head_dim_v]``, of any numbers in hidden rows; may be ``out``.
        y_lse: ``[T, H]``, natural; needed for ``lse`` and for ``sinks``.
        sinks: ``[H]``, or None.
    """
    if sinks is not None:
        assert y_lse is not None, "sinks need the log-sum-exp"
        with_sink = torch.logaddexp(y_lse, sinks.float())
        y = (y * torch.exp(y_lse - with_sink)[..., None]).to(out.dtype)
        y_lse = with_sink
    if y is out:
        out.masked_fill_(hidden[:, None, None], 0.0)
    else:
        out.copy_(y.masked_fill(hidden[:, None, None], 0.0))
    if lse is not None:
        assert y_lse is not None, "no log-sum-exp was computed"
        lse.copy_(y_lse.masked_fill(hidden[:, None], float("-inf")))
