"""Fake kernels of the state ops: they state what must fit and compute nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchpaged.custom_ops.state.call import ConvCall, LinearAttentionCall


def _expect_dims(count: int, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        torch._check(
            tensor.dim() == count,
            lambda name=name, tensor=tensor: f"{name}: expected {count} dimensions, got {tensor.dim()}",
        )


def _expect_batch(call: ConvCall | LinearAttentionCall) -> None:
    batch = {
        "state_slots": call.state_slots,
        "seq_lens": call.seq_lens,
        "query_start_loc": call.query_start_loc,
    }
    _expect_dims(1, **batch)
    for name, tensor in batch.items():
        torch._check(
            tensor.dtype == torch.int32,
            lambda name=name, got=tensor.dtype: f"{name}: expected int32, got {got}",
        )
    torch._check(
        call.state_slots.shape[0] == call.seq_lens.shape[0],
        lambda: "state_slots, seq_lens: expected one of each per request",
    )


def _causal_conv(call: ConvCall) -> None:
    _expect_dims(2, x=call.x, weight=call.weight, out=call.out)
    _expect_dims(3, conv_state=call.conv_state)
    _expect_batch(call)
    channels = call.x.shape[1]
    torch._check(
        call.weight.shape[0] == channels and call.conv_state.shape[2] == channels,
        lambda: f"weight, conv_state: expected x's {channels} channels",
    )
    torch._check(
        call.conv_state.shape[1] == call.weight.shape[1] - 1,
        lambda: "conv_state: expected one input fewer than weight is wide",
    )
    torch._check(call.x.shape[0] == call.out.shape[0], lambda: "out: expected as many rows as x")


def _linear_attention(call: LinearAttentionCall) -> None:
    _expect_dims(3, q=call.q, k=call.k, v=call.v, out=call.out)
    _expect_dims(4, state=call.state)
    torch._check(call.g.dim() in (2, 3), lambda: f"g: expected 2 or 3 dimensions, got {call.g.dim()}")
    _expect_batch(call)
    torch._check(
        call.state.shape[1:] == (call.v.shape[1], call.q.shape[2], call.v.shape[2]),
        lambda: "state: expected [num_slots, v's heads, q's width, v's width]",
    )
    for name, x in (("k", call.k), ("v", call.v), ("g", call.g), ("out", call.out)):
        torch._check(x.shape[0] == call.q.shape[0], lambda name=name: f"{name}: expected as many rows as q")


FAKES: dict[str, Callable[..., None]] = {
    "causal_conv": _causal_conv,
    "linear_attention": _linear_attention,
}
