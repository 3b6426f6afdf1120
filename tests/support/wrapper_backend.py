"""A backend around a library whose state is a Python object, in the shape of FlashInfer's: a wrapper per
captured batch size, planned on the host.

Its op gets the wrappers as a handle, an int64 tensor, and looks them up where it launches. The wrapper itself
holds what such libraries hold: index buffers at fixed addresses, the pages of one request after those
of another.
"""

import weakref
from typing import Any

import torch
from sessions import planned_op
from torch import Tensor

from torchpaged.backends import (
    AttentionSpec,
    Backend,
    Capabilities,
    GraphSupport,
    HostLengths,
    Planning,
    Session,
    assert_planned,
)
from torchpaged.backends.session import PlannedBatch
from torchpaged.custom_ops import BACKEND_OPS


class Wrapper:
    """Attention of batches of ``num_reqs`` single tokens, at most ``max_pages`` pages in all."""

    def __init__(self, num_reqs: int, max_pages: int) -> None:
        self.num_reqs = num_reqs
        self.indptr = torch.zeros(num_reqs + 1, dtype=torch.int32)
        self.indices = torch.zeros(max_pages, dtype=torch.int32)
        self.seq_lens = torch.zeros(num_reqs, dtype=torch.int32)

    def plan(self, table: Tensor, seq_lens: list[int], block_size: int) -> None:
        assert len(seq_lens) == self.num_reqs
        pages = [-(-n // block_size) for n in seq_lens]
        with torch.inference_mode():
            self.indptr[1:] = torch.tensor(pages, dtype=torch.int32).cumsum(0)
            self.indices[: sum(pages)] = torch.cat([table[row, :n] for row, n in enumerate(pages)])
            self.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        starts: Tensor,
        out: Tensor,
        lse: Tensor | None,
        width: int,
        **options: Any,
    ) -> None:
        """From its own indices, as a table again, since the kernels here take one."""
        column = torch.arange(width, dtype=torch.int32)[None]
        at = (self.indptr[:-1, None] + column).clamp_max(len(self.indices) - 1).long()
        table = torch.where(column < self.indptr.diff()[:, None], self.indices[at], 0)
        BACKEND_OPS["default"].paged_attention(
            q, k_cache, v_cache, table, self.seq_lens, starts, out, lse, **options
        )


class WrapperSession(Session):
    """A wrapper for each number of requests, made at the first plan of such a batch: ahead of its capture."""

    def _open(self, specs: Any) -> None:
        rows, width, _ = self.limits.need("max_num_reqs", "max_blocks_per_req", "block_size")
        self.wrappers: dict[int, Wrapper] = {}
        self.table, self.lens = (
            torch.zeros(rows, width, dtype=torch.int32),
            torch.full((rows,), -1, dtype=torch.int32),
        )
        self.handle = torch.tensor([id(self)])
        SESSIONS[id(self)] = self

    def _make_workspace(self, spec: AttentionSpec) -> dict[str, Tensor]:
        return {"handle": self.handle, "planned_table": self.table, "planned_lens": self.lens}

    def _plan(self, batch: PlannedBatch, host: HostLengths | None) -> None:
        num_reqs, lens = (
            batch.seq_lens.shape[0],
            batch.seq_lens.tolist() if host is None else list(host.seq_lens),
        )
        rows, width, block_size = self.limits.need("max_num_reqs", "max_blocks_per_req", "block_size")
        if num_reqs not in self.wrappers:
            self.wrappers[num_reqs] = Wrapper(num_reqs, rows * width)
        self.wrappers[num_reqs].plan(batch.block_table, lens, block_size)
        with torch.inference_mode():
            self.table[:num_reqs, : batch.block_table.shape[1]].copy_(batch.block_table)
            self.lens[:num_reqs].copy_(batch.seq_lens)


SESSIONS: weakref.WeakValueDictionary[int, WrapperSession] = weakref.WeakValueDictionary()


def _attend(
    *tensors: Any, handle: Tensor, planned_table: Tensor, planned_lens: Tensor, **options: Any
) -> None:
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out, *lse = tensors
    assert_planned((planned_lens, planned_table), (seq_lens, block_table))
    wrapper = SESSIONS[int(handle)].wrappers[seq_lens.shape[0]]
    results = out, lse[0] if lse else options.pop("lse", None)
    wrapper.run(q, k_cache, v_cache, query_start_loc, *results, block_table.shape[1], **options)


_FLOATS = (torch.float32, torch.bfloat16)
WRAPPER = Backend(
    "wrapper",
    Capabilities(("cpu",), _FLOATS, _FLOATS, GraphSupport.SINGLE_TOKEN_DECODE, planning=Planning.EVERY_STEP),
    {"paged_attention": planned_op("torchpaged_wrapper", _attend, "handle", "planned_table", "planned_lens")},
    lambda: None,
    WrapperSession,
)
