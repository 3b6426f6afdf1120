"""Fake kernels of the ops around attention: they state what must fit and compute nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.facts import expect, expect_dims, expect_dtype, expect_rows
from torchpaged.custom_ops.layers.call import LinearCall, NormCall


def _embedding(input_ids: Tensor, weight: Tensor, out: Tensor, **_: Any) -> None:
    expect_dims(1, input_ids=input_ids)
    expect_dtype(torch.int64, input_ids=input_ids)
    expect_dims(2, weight=weight, out=out)
    expect_rows("input_ids", input_ids.shape[0], out=out)
    width = weight.shape[1]
    expect(out.shape[1] == width, f"out: expected {width} columns, got {out.shape[1]}")


def _rms_norm(call: NormCall) -> None:
    x, weight, out = call[:3]
    expect_dims(2, x=x, out=out)
    expect_rows("x", x.shape[0], out=out)
    width = x.shape[1]
    expect(out.shape[1] == width, f"out: expected {width} columns, got {out.shape[1]}")
    expect(weight.shape[0] == width, f"weight: expected {width} numbers, got {weight.shape[0]}")


def _act_and_mul(gate_up: Tensor, out: Tensor, **_: Any) -> None:
    expect_dims(2, gate_up=gate_up, out=out)
    expect_rows("gate_up", gate_up.shape[0], out=out)
    columns = gate_up.shape[1]
    expect(columns == 2 * out.shape[1], f"out: expected half of {columns} columns, got {out.shape[1]}")


def _gate_heads(x: Tensor, gate: Tensor, out: Tensor) -> None:
    expect_dims(3, x=x, gate=gate, out=out)
    expect(out.shape == x.shape, "out: expected x's shape")
    fits = gate.shape[:2] == x.shape[:2] and (gate.shape[2] == x.shape[2] or gate.shape[2] == 1)
    expect(fits, "gate: expected x's numbers, or one of each head")


def _linear(call: LinearCall) -> None:
    x, weight, out = call[:3]
    expect_dims(2, x=x, weight=weight, out=out)
    expect_rows("x", x.shape[0], out=out)
    expect(x.shape[1] == weight.shape[1], f"weight: expected {x.shape[1]} columns, got {weight.shape[1]}")
    width = out.shape[1] if call.activation == "none" else 2 * out.shape[1]
    text = f"out: expected a row of {weight.shape[0]} numbers (half with an activation)"
    expect(weight.shape[0] == width, text)


FAKES: dict[str, Callable[..., None]] = {
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "act_and_mul": _act_and_mul,
    "gate_heads": _gate_heads,
    "linear": _linear,
}
