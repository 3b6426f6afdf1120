"""Fake kernels of the ops around attention: they state what must fit and compute nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.layers.call import LinearCall, NormCall


def _expect_dims(**tensors: Tensor) -> None:
    """Two of each."""
    dims = [tensor.dim() for tensor in tensors.values()]
    torch._check(
        all(dim == 2 for dim in dims),
        lambda: f"{', '.join(tensors)}: expected 2 dimensions, got {', '.join(map(str, dims))}",
    )


def _expect_rows(out: Tensor, like: Tensor, name: str) -> None:
    torch._check(out.shape[0] == like.shape[0], lambda: f"out: expected as many rows as {name}")


def _embedding(input_ids: Tensor, weight: Tensor, out: Tensor, **_: Any) -> None:
    torch._check(input_ids.dim() == 1, lambda: f"input_ids: expected 1 dimension, got {input_ids.dim()}")
    torch._check(input_ids.dtype == torch.int64, lambda: f"input_ids: expected int64, got {input_ids.dtype}")
    _expect_dims(weight=weight, out=out)
    _expect_rows(out, input_ids, "input_ids")
    torch._check(
        out.shape[1] == weight.shape[1],
        lambda: f"out: expected {weight.shape[1]} columns, got {out.shape[1]}",
    )


def _rms_norm(call: NormCall) -> None:
    x, weight, out = call[:3]
    _expect_dims(x=x, out=out)
    _expect_rows(out, x, "x")
    torch._check(
        x.shape[1] == out.shape[1], lambda: f"out: expected {x.shape[1]} columns, got {out.shape[1]}"
    )
    torch._check(
        x.shape[1] == weight.shape[0], lambda: f"weight: expected {x.shape[1]} numbers, got {weight.shape[0]}"
    )


def _act_and_mul(gate_up: Tensor, out: Tensor, **_: Any) -> None:
    _expect_dims(gate_up=gate_up, out=out)
    _expect_rows(out, gate_up, "gate_up")
    torch._check(
        gate_up.shape[1] == 2 * out.shape[1],
        lambda: f"out: expected half of {gate_up.shape[1]} columns, got {out.shape[1]}",
    )


def _linear(call: LinearCall) -> None:
    x, weight, out = call[:3]
    _expect_dims(x=x, weight=weight)
    _expect_dims(out=out)
    _expect_rows(out, x, "x")
    torch._check(
        x.shape[1] == weight.shape[1], lambda: f"weight: expected {x.shape[1]} columns, got {weight.shape[1]}"
    )
    width = out.shape[1] if call.activation == "none" else 2 * out.shape[1]
    torch._check(
        weight.shape[0] == width,
        lambda: f"out: expected a row of {weight.shape[0]} numbers (half with an activation)",
    )


FAKES: dict[str, Callable[..., None]] = {
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "act_and_mul": _act_and_mul,
    "linear": _linear,
}
