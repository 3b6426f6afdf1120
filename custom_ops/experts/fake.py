"""Fake kernels of the ops of mixtures of experts: they state what must fit and compute nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchpaged.custom_ops.experts.call import ExpertsCall, RouteCall


def _expect(fits: bool, text: str) -> None:
    torch._check(fits, lambda: text)


def _route_experts(call: RouteCall) -> None:
    x, weight, ids, weights = call[:4]
    _expect(
        x.dim() == weight.dim() == ids.dim() == weights.dim() == 2,
        "x, weight, ids, weights: expected 2 dimensions",
    )
    _expect(x.shape[1] == weight.shape[1], f"weight: expected {x.shape[1]} columns, got {weight.shape[1]}")
    _expect(ids.shape[0] == x.shape[0], "ids: expected as many rows as x")
    _expect(weights.shape[0] == x.shape[0], "weights: expected as many rows as x")
    _expect(ids.shape[1] == weights.shape[1], "weights: expected as many columns as ids")


def _apply_experts(call: ExpertsCall) -> None:
    x, gate_up, down, ids, weights, out = call[:6]
    _expect(
        x.dim() == out.dim() == ids.dim() == weights.dim() == 2, "x, ids, weights, out: expected 2 dimensions"
    )
    _expect(gate_up.dim() == down.dim() == 3, "gate_up, down: expected 3 dimensions")
    _expect(ids.shape[0] == x.shape[0], "ids: expected as many rows as x")
    _expect(weights.shape[0] == x.shape[0], "weights: expected as many rows as x")
    _expect(out.shape[0] == x.shape[0], "out: expected as many rows as x")
    _expect(out.shape[1] == x.shape[1], f"out: expected {x.shape[1]} columns, got {out.shape[1]}")
    _expect(gate_up.shape[0] == down.shape[0], "gate_up: expected as many experts as down")
    _expect(gate_up.shape[2] == x.shape[1], f"gate_up: expected {x.shape[1]} columns")
    _expect(down.shape[1] == x.shape[1], f"down: expected {x.shape[1]} rows of an expert")
    _expect(gate_up.shape[1] == 2 * down.shape[2], "gate_up: expected twice as many rows as down's columns")


FAKES: dict[str, Callable[..., None]] = {"route_experts": _route_experts, "apply_experts": _apply_experts}
