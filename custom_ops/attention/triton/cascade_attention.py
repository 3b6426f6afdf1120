"""cascade_attention of the ``triton`` backend: two calls of its attention, the prefixes' without sinks, and
its merge (arXiv:2402.05099)."""

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.cascade_call import CascadeCall, MergeCall
from torchpaged.custom_ops.attention.check import check_cascade_attention


def cascade_attention(call: CascadeCall) -> None:
    """Launch; arguments as in ``custom_ops/attention/schema.py``."""
    check_cascade_attention(call)
    ops = torch.ops.torchpaged
    compose(ops.paged_attention.triton, ops.merge_attn_states.triton, call)


def compose(attend: Any, merge: Any, call: CascadeCall) -> None:
    """The whole of a checked call by ``attend`` and ``merge``, handles of one backend's ops."""
    own = call.own

    def state() -> tuple[Tensor, Tensor]:
        shape = own.out.shape
        return own.out.new_empty(shape, dtype=own.dtype), own.out.new_empty(shape[:2], dtype=torch.float32)

    shared, rest = state(), state()
    _launch(attend, call.prefixes(own.q[call.order], *shared))
    _launch(attend, call.rest(*rest))
    _launch(merge, call.merge(shared, rest))


def _launch(op: Any, call: AttentionCall | MergeCall) -> None:
    tensors, options = call.flat()
    op(*tensors, **options)
