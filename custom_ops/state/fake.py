"""Fake kernels of the state ops: they state what must fit and compute nothing."""

from collections.abc import Callable

import torch

from torchpaged.custom_ops.facts import expect, expect_dims, expect_dtype, expect_rows
from torchpaged.custom_ops.state.call import (
    ConvCall,
    DeltaStepCall,
    GatedNormCall,
    GatesCall,
    LinearAttentionCall,
    Mamba2StepCall,
)
from torchpaged.custom_ops.state.channels import RgLruCall, SelectiveScanCall


def _expect_batch(call: ConvCall | LinearAttentionCall | SelectiveScanCall | RgLruCall) -> None:
    slots, seq_lens, starts = call.state_slots, call.seq_lens, call.query_start_loc
    batch = {"state_slots": slots, "seq_lens": seq_lens, "query_start_loc": starts}
    expect_dims(1, **batch)
    expect_dtype(torch.int32, **batch)
    expect(slots.shape[0] == seq_lens.shape[0], "state_slots, seq_lens: expected one of each per request")


def _causal_conv(call: ConvCall) -> None:
    x, weight, conv_state = call[:3]
    expect_dims(2, x=x, weight=weight, out=call.out)
    expect_dims(3, conv_state=conv_state)
    _expect_batch(call)
    channels = x.shape[1]
    fits = weight.shape[0] == channels and conv_state.shape[2] == channels
    expect(fits, f"weight, conv_state: expected x's {channels} channels")
    fits = conv_state.shape[1] == weight.shape[1] - 1
    expect(fits, "conv_state: expected one input fewer than weight is wide")
    expect_rows("x", x.shape[0], out=call.out)
    for name, gate in (("in_gate", call.in_gate), ("out_gate", call.out_gate)):
        expect(gate is None or gate.shape == x.shape, f"{name}: expected x's shape")


def _linear_attention(call: LinearAttentionCall) -> None:
    q, k, v, g, state = call[:5]
    expect_dims(3, q=q, k=k, v=v, out=call.out)
    expect_dims(4, state=state)
    expect(g.dim() in (2, 3), f"g: expected 2 or 3 dimensions, got {g.dim()}")
    _expect_batch(call)
    fits = state.shape[1:] == (v.shape[1], q.shape[2], v.shape[2])
    expect(fits, "state: expected [num_slots, v's heads, q's width, v's width]")
    expect_rows("q", q.shape[0], k=k, v=v, g=g, out=call.out)


def _delta_gates(call: GatesCall) -> None:
    a, b, a_log, dt_bias = call[:4]
    expect_dims(3, a=a)
    expect_dims(1, a_log=a_log, dt_bias=dt_bias)
    sizes = (a.shape[0], a.shape[1] * a.shape[2])
    of_heads = sizes if b is None else (sizes[0], a_log.shape[0])
    fits = b is None or (b.shape[0], b.shape[1] * b.shape[2]) == of_heads
    expect(fits, "b: expected a number per token and head")
    expect(dt_bias.shape == sizes[1:], "dt_bias: expected as many numbers as a's token")
    expect(call.g.shape == sizes, "g: expected as many numbers as a")
    expect(call.beta.shape == of_heads, "beta: expected as many numbers as b, or else a")


def _gated_rms_norm(call: GatedNormCall) -> None:
    x, gate, weight, skip, skip_weight = call.x, call.gate, call.weight, call.skip, call.skip_weight
    expect_dims(3, x=x, gate=gate)
    num_tokens, num_heads, width = x.shape
    expect(call.out.shape == x.shape, "out: expected x's shape")
    of_heads = (num_heads,) if weight.dim() == 2 else ()
    expect(weight.shape == (*of_heads, width), f"weight: expected {width} numbers")
    fits = gate.shape[0] == num_tokens and gate.shape[1] * gate.shape[2] == num_heads * width
    expect(fits, "gate: expected x's numbers of each token, in groups")
    if skip is not None and skip_weight is not None:
        expect_dims(3, skip=skip)
        numbers = skip.shape[1] * skip.shape[2] == num_heads * width
        fits = numbers and skip_weight.shape == skip.shape[1:2]
        text = "skip, skip_weight: expected x's numbers of each token, and a weight per head of skip"
        expect(fits, text)


def _delta_step(call: DeltaStepCall) -> None:
    expect_dims(2, x=call.x, weight=call.weight)
    expect_dims(3, conv_state=call.conv_state, a=call.a, b=call.b, gate=call.gate, out=call.out)
    expect_dims(4, state=call.state)
    _, num_heads, key_dim, value_dim = call.state.shape
    fits = call.x.shape[1] == 2 * call.num_key_heads * key_dim + num_heads * value_dim
    expect(fits, "x: expected queries, keys and values of state's sizes")
    expect(call.out.shape[1:] == (num_heads, value_dim), "out: expected state's values")
    conv, gates, attention, norm = call.parts()
    _causal_conv(conv)
    _delta_gates(gates)
    _linear_attention(attention)
    _gated_rms_norm(norm)


def _mamba2_step(call: Mamba2StepCall) -> None:
    expect_dims(2, x=call.x, weight=call.weight, dt=call.dt)
    expect_dims(3, conv_state=call.conv_state, out=call.out)
    expect_dims(4, state=call.state)
    _, num_heads, key_dim, value_dim = call.state.shape
    fits = call.x.shape[1] == num_heads * value_dim + 2 * call.num_groups * key_dim
    expect(fits, "x: expected values, keys and queries of state's sizes")
    expect(call.out.shape[1:] == (num_heads, value_dim), "out: expected state's values")
    expect(call.gate is None or call.gate.shape == call.out.shape, "gate: expected out's shape")
    expect(call.skip_weight.shape == (num_heads,), "skip_weight: expected a number per head")
    conv, gates, attention = call.parts()
    _causal_conv(conv)
    _delta_gates(gates)
    _linear_attention(attention)


def _expect_channels(call: SelectiveScanCall | RgLruCall, key_dim: int) -> None:
    expect_dims(2, x=call.x, out=call.out)
    expect_dims(4, state=call.state)
    _expect_batch(call)
    fits = call.state.shape[1:] == (call.x.shape[1], key_dim, 1)
    expect(fits, f"state: expected {key_dim} numbers of each of x's channels")
    expect(call.out.shape == call.x.shape, "out: expected x's shape")
    expect(call.gate is None or call.gate.shape == call.x.shape, "gate: expected x's shape")


def _selective_scan(call: SelectiveScanCall) -> None:
    expect_dims(2, x=call.x, a_log=call.a_log, b=call.b, c=call.c)
    _expect_channels(call, call.a_log.shape[1])
    expect(call.dt.shape == call.x.shape, "dt: expected x's shape")
    sizes = call.x.shape[0], call.a_log.shape[1]
    expect(call.b.shape == sizes and call.c.shape == sizes, "b, c: expected as many numbers as a_log's rows")


def _rg_lru(call: RgLruCall) -> None:
    expect_dims(2, input_bias=call.input_bias, recurrent_bias=call.recurrent_bias)
    expect_dims(3, input_weight=call.input_weight, recurrent_weight=call.recurrent_weight)
    _expect_channels(call, 1)
    blocks, width, _ = call.input_weight.shape
    expect(blocks * width == call.x.shape[1], "input_weight: expected blocks of x's channels")
    expect(call.recurrent_weight.shape == (blocks, width, width), "recurrent_weight: expected input_weight's")


FAKES: dict[str, Callable[..., None]] = {
    "causal_conv": _causal_conv,
    "linear_attention": _linear_attention,
    "delta_gates": _delta_gates,
    "gated_rms_norm": _gated_rms_norm,
    "delta_step": _delta_step,
    "mamba2_step": _mamba2_step,
    "selective_scan": _selective_scan,
    "rg_lru": _rg_lru,
}
