"""A batch as a library's plan needs it, in tensors that never move: copies to compare with, lengths without
surprises, hidden rows.

    planned = PlannedBatchBuffers(limits, device)
    planned.write(batch)                    # once per step, outside traces and graphs; waits for nothing
    planned.check(call)                     # in the op, on the device
    planned.finish(call, y, y_lse, sinks)   # in the op: what the library gave, as the contract has it
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.backends.session import PlannedBatch, assert_planned
from torchpaged.backends.spec import AttentionSpec, Limits
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.checks import reads_values
from torchpaged.custom_ops.errors import PlanError


class Kind(NamedTuple):
    """What a plan depends on besides the batch: layers of one kind share it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    causal: bool
    window: tuple[int, int]
    soft_cap: float
    scale: float

    @classmethod
    def of_spec(cls, spec: AttentionSpec) -> "Kind":
        """Of layers that ask for this."""
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        sizes = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.dtype, spec.kv_dtype or spec.dtype
        return cls(*sizes, spec.causal, _window(spec.causal, *spec.window_size), spec.logits_soft_cap, scale)

    @classmethod
    def of_call(cls, call: AttentionCall) -> "Kind":
        """Of the layer that calls."""
        q, k_cache = call.q, call.k_cache
        window = _window(call.causal, call.window_left, call.window_right)
        sizes = q.shape[1], k_cache.shape[2], q.shape[2], q.dtype, k_cache.dtype
        return cls(*sizes, call.causal, window, call.logits_soft_cap, call.scale)


def _window(causal: bool, left: int, right: int) -> tuple[int, int]:
    """A causal query sees nothing to its right, whatever the window says."""
    if not causal:
        return left, right
    return (left, 0) if left >= 0 else (-1, -1)


class PlannedBatchBuffers:
    """The tensors of the largest batch.

    Args:
        limits: with ``max_num_reqs``, ``max_num_tokens``, ``max_blocks_per_req`` and ``block_size``.
        device: where the batches are.

    Attributes:
        lens: ``[max_num_reqs]`` int32, keys of each request, 0 for a negative number; behind the batch's
            requests whatever was there.
        table: ``[max_num_reqs, max_blocks_per_req]`` int32, likewise: blocks in use, 0 behind a request's
            last, so that garbage is never followed.
        starts: ``[max_num_reqs + 1]`` int32, as the batch's ``query_start_loc``.
        hidden: ``[max_num_tokens]`` bool: padding, and queries before their sequence's first token. They see
            nothing.

    Raises:
        ArgumentError: one of the limits was not said.
    """

    def __init__(self, limits: Limits, device: torch.device) -> None:
        rows, tokens, width, self.block_size = limits.need(
            "max_num_reqs", "max_num_tokens", "max_blocks_per_req", "block_size"
        )
        ints: Any = {"dtype": torch.int32, "device": device}
        with torch.inference_mode(False):
            self._raw_lens = torch.full((rows,), -1, **ints)
            self._raw_table = torch.zeros(rows, width, **ints)
            self.lens, self.table = torch.zeros(rows, **ints), torch.zeros(rows, width, **ints)
            self.starts = torch.full((rows + 1,), -1, **ints)
            self.hidden = torch.ones(tokens, dtype=torch.bool, device=device)
            dtypes = (torch.bfloat16, torch.float16)
            self._zeros = {dtype: torch.zeros((), dtype=dtype, device=device) for dtype in dtypes}
        for tensor in self.tensors().values():
            torch._dynamo.mark_static_address(tensor, guard=False)
        self._checked: set[int] = set()  # pools of the layers of the step that is being captured

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by name."""
        return {name.lstrip("_"): tensor for name, tensor in vars(self).items() if isinstance(tensor, Tensor)}

    def write(self, batch: PlannedBatch) -> None:
        """Take over a batch."""
        rows, width = batch.block_table.shape
        self._checked.clear()
        with torch.inference_mode():
            self._raw_lens[:rows].copy_(batch.seq_lens)
            self._raw_table[:rows, :width].copy_(batch.block_table)
            self.starts[: rows + 1].copy_(batch.query_start_loc)
            torch.clamp_min(batch.seq_lens, 0, out=self.lens[:rows])
            self.table[:rows, :width].copy_(blocks_in_use(batch.block_table, batch.seq_lens, self.block_size))
            self.hidden.copy_(hidden_queries(batch.seq_lens, batch.query_start_loc, len(self.hidden)))

    def check(self, call: AttentionCall) -> None:
        """On the device: the batch of a call is the one that was planned.

        In a captured step the first layer's comparison stands for all of them, since nothing between them may
        change the batch. Layers are told apart by their pools: one that comes again begins another step, as
        do a plan and an eager call.

        Raises:
            RuntimeError: it is not; on a GPU a device-side assertion.
        """
        if not is_capturing(call.q.device):
            self._checked.clear()  # a warm-up: what is captured next is another step
        else:
            pool = call.k_cache.data_ptr()
            first = not self._checked or pool in self._checked
            self._checked = {pool} if first else self._checked | {pool}
            if not first:
                return
        assert_planned(
            (self._raw_lens, self._raw_table, self.starts),
            (call.seq_lens, call.block_table, call.query_start_loc),
        )

    def finish(
        self, call: AttentionCall, y: Tensor, y_lse: Tensor | None, sinks: Tensor | None = None
    ) -> None:
        """`finish` with the hidden rows of the planned batch."""
        zero = self._zeros.get(call.out.dtype)
        finish(self.hidden[: len(call.out)], call.out, call.lse, y, y_lse, sinks, zero)


def not_planned(name: str, call: AttentionCall) -> PlanError:
    """For the op of the backend ``name``: a batch of this shape was not planned."""
    return PlanError(
        f"metadata: expected a batch that was planned, got {call.num_reqs} requests of at most "
        f"{call.max_query_len} tokens that backend {name!r} knows nothing of; "
        "call session.plan(metadata) before the step"
    )


def is_capturing(device: torch.device) -> bool:
    """Whether the call at hand becomes part of a graph, on a CPU of a tape."""
    if device.type == "cuda":
        return torch.cuda.is_current_stream_capturing()
    return not reads_values(device)


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
    zero: Tensor | None = None,
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
        zero: of no dimension, in ``out``'s dtype; saves a kernel.
    """
    if sinks is not None:
        assert y_lse is not None, "sinks need the log-sum-exp"
        with_sink = torch.logaddexp(y_lse, sinks.float())
        y = (y * torch.exp(y_lse - with_sink)[..., None]).to(out.dtype)
        y_lse = with_sink
    if y is out:
        out.masked_fill_(hidden[:, None, None], 0.0)
    elif zero is None or y.dtype != zero.dtype:
        out.copy_(y.masked_fill(hidden[:, None, None], 0.0))
    else:
        torch.where(hidden[:, None, None], zero, y, out=out)
    if lse is not None:
        assert y_lse is not None, "no log-sum-exp was computed"
        lse.copy_(y_lse.masked_fill(hidden[:, None], float("-inf")))
