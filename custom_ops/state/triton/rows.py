"""A row of a batch, as the Triton kernels over states have it."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchpaged.custom_ops.state.call import NORM_EPS

EPS = tl.constexpr(NORM_EPS)


class Row(NamedTuple):
    """A row of a batch, as a kernel has it: its first token, its tokens, how many of these are padding, its
    slot, 0 where it writes nothing, and its length."""

    begin: Any
    count: Any
    first: Any
    slot: Any
    seq_len: Any


@triton.jit
def row_of(req, batch):
    """`Row` of a request; out of L2, since L1 may hold an older step's where the kernels ahead still run."""
    begin = tl.load(batch.starts + req, cache_modifier=".cg")
    count = tl.load(batch.starts + req + 1, cache_modifier=".cg") - begin
    seq_len = tl.load(batch.lens + req, cache_modifier=".cg")
    slot = tl.load(batch.slots + req, cache_modifier=".cg")
    first = tl.minimum(tl.maximum(count - seq_len, 0), count)
    slot = tl.where(first < count, slot, 0)
    first = tl.where(slot > 0, first, count)
    return Row(begin, count, first, slot.to(tl.int64), seq_len)
