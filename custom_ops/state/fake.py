"""Fake kernels of the state ops: they state what must fit and compute nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchpaged.custom_ops.state.call import (
    ConvCall,
    DeltaStepCall,
    GatedNormCall,
    GatesCall,
    LinearAttentionCall,
)


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
    for name, gate in (("in_gate", call.in_gate), ("out_gate", call.out_gate)):
        torch._check(
            gate is None or gate.shape == call.x.shape, lambda name=name: f"{name}: expected x's shape"
        )


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


def _delta_gates(call: GatesCall) -> None:
    _expect_dims(3, a=call.a)
    _expect_dims(1, a_log=call.a_log, dt_bias=call.dt_bias)
    sizes = (call.a.shape[0], call.a.shape[1] * call.a.shape[2])
    of_heads = sizes if call.b is None else (sizes[0], call.a_log.shape[0])
    torch._check(
        call.b is None or (call.b.shape[0], call.b.shape[1] * call.b.shape[2]) == of_heads,
        lambda: "b: expected a number per token and head",
    )
    torch._check(call.dt_bias.shape == sizes[1:], lambda: "dt_bias: expected as many numbers as a's token")
    torch._check(call.g.shape == sizes, lambda: "g: expected as many numbers as a")
    torch._check(call.beta.shape == of_heads, lambda: "beta: expected as many numbers as b, or else a")


def _gated_rms_norm(call: GatedNormCall) -> None:
    _expect_dims(3, x=call.x, gate=call.gate)
    num_tokens, num_heads, width = call.x.shape
    torch._check(call.out.shape == call.x.shape, lambda: "out: expected x's shape")
    of_heads = (num_heads,) if call.weight.dim() == 2 else ()
    torch._check(call.weight.shape == (*of_heads, width), lambda: f"weight: expected {width} numbers")
    torch._check(
        call.gate.shape[0] == num_tokens and call.gate.shape[1] * call.gate.shape[2] == num_heads * width,
        lambda: "gate: expected x's numbers of each token, in groups",
    )
    if call.skip is not None and call.skip_weight is not None:
        _expect_dims(3, skip=call.skip)
        torch._check(
            call.skip.shape[1] * call.skip.shape[2] == num_heads * width
            and call.skip_weight.shape == call.skip.shape[1:2],
            lambda: "skip, skip_weight: expected x's numbers of each token, and a weight per head of skip",
        )


def _delta_step(call: DeltaStepCall) -> None:
    _expect_dims(2, x=call.x, weight=call.weight)
    _expect_dims(3, conv_state=call.conv_state, a=call.a, b=call.b, gate=call.gate, out=call.out)
    _expect_dims(4, state=call.state)
    _, num_heads, key_dim, value_dim = call.state.shape
    keys = call.num_key_heads
    torch._check(
        call.x.shape[1] == 2 * keys * key_dim + num_heads * value_dim,
        lambda: "x: expected queries, keys and values of state's sizes",
    )
    torch._check(call.out.shape[1:] == (num_heads, value_dim), lambda: "out: expected state's values")
    conv, gates, attention, norm = call.parts()
    _causal_conv(conv)
    _delta_gates(gates)
    _linear_attention(attention)
    _gated_rms_norm(norm)


FAKES: dict[str, Callable[..., None]] = {
    "causal_conv": _causal_conv,
    "linear_attention": _linear_attention,
    "delta_gates": _delta_gates,
    "gated_rms_norm": _gated_rms_norm,
    "delta_step": _delta_step,
}
