"""Fake kernels of the ops around attention: they state what must fit and compute nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _embedding(input_ids: Tensor, weight: Tensor, out: Tensor, **_: Any) -> None:
    torch._check(input_ids.dim() == 1, lambda: f"input_ids: expected 1 dimension, got {input_ids.dim()}")
    torch._check(input_ids.dtype == torch.int64, lambda: f"input_ids: expected int64, got {input_ids.dtype}")
    torch._check(
        weight.dim() == 2 and out.dim() == 2,
        lambda: f"weight, out: expected 2 dimensions, got {weight.dim()}, {out.dim()}",
    )
    torch._check(out.shape[0] == input_ids.shape[0], lambda: "out: expected as many rows as input_ids")
    torch._check(
        out.shape[1] == weight.shape[1],
        lambda: f"out: expected {weight.shape[1]} columns, got {out.shape[1]}",
    )


def _rms_norm(x: Tensor, weight: Tensor, out: Tensor, **_: Any) -> None:
    torch._check(
        x.dim() == 2 and out.dim() == 2, lambda: f"x, out: expected 2 dimensions, got {x.dim()}, {out.dim()}"
    )
    torch._check(x.shape[0] == out.shape[0], lambda: "out: expected as many rows as x")
    torch._check(
        x.shape[1] == out.shape[1], lambda: f"out: expected {x.shape[1]} columns, got {out.shape[1]}"
    )
    torch._check(
        x.shape[1] == weight.shape[0], lambda: f"weight: expected {x.shape[1]} numbers, got {weight.shape[0]}"
    )


def _act_and_mul(gate_up: Tensor, out: Tensor, **_: Any) -> None:
    torch._check(
        gate_up.dim() == 2 and out.dim() == 2,
        lambda: f"gate_up, out: expected 2 dimensions, got {gate_up.dim()}, {out.dim()}",
    )
    torch._check(gate_up.shape[0] == out.shape[0], lambda: "out: expected as many rows as gate_up")
    torch._check(
        gate_up.shape[1] == 2 * out.shape[1],
        lambda: f"out: expected half of {gate_up.shape[1]} columns, got {out.shape[1]}",
    )


def _linear(x: Tensor, weight: Tensor, out: Tensor, *, activation: str = "none", **_: Any) -> None:
    torch._check(
        x.dim() == 2 and weight.dim() == 2,
        lambda: f"x, weight: expected 2 dimensions, got {x.dim()}, {weight.dim()}",
    )
    torch._check(out.dim() == 2, lambda: f"out: expected 2 dimensions, got {out.dim()}")
    torch._check(x.shape[0] == out.shape[0], lambda: "out: expected as many rows as x")
    torch._check(
        x.shape[1] == weight.shape[1], lambda: f"weight: expected {x.shape[1]} columns, got {weight.shape[1]}"
    )
    width = out.shape[1] if activation == "none" else 2 * out.shape[1]
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
