"""Fake kernels of the ops of mixtures of experts: they state what must fit and compute nothing."""

from collections.abc import Callable

from torchpaged.custom_ops.experts.call import ExpertsCall, RouteCall
from torchpaged.custom_ops.facts import expect, expect_rows


def _route_experts(call: RouteCall) -> None:
    x, weight, ids, weights = call[:4]
    expect(
        x.dim() == weight.dim() == ids.dim() == weights.dim() == 2,
        "x, weight, ids, weights: expected 2 dimensions",
    )
    expect(x.shape[1] == weight.shape[1], f"weight: expected {x.shape[1]} columns, got {weight.shape[1]}")
    expect_rows("x", x.shape[0], ids=ids, weights=weights)
    expect(ids.shape[1] == weights.shape[1], "weights: expected as many columns as ids")


def _apply_experts(call: ExpertsCall) -> None:
    x, gate_up, down, ids, weights, out = call[:6]
    expect(
        x.dim() == out.dim() == ids.dim() == weights.dim() == 2, "x, ids, weights, out: expected 2 dimensions"
    )
    expect(gate_up.dim() == down.dim() == 3, "gate_up, down: expected 3 dimensions")
    expect_rows("x", x.shape[0], ids=ids, weights=weights, out=out)
    expect(out.shape[1] == x.shape[1], f"out: expected {x.shape[1]} columns, got {out.shape[1]}")
    expect(gate_up.shape[0] == down.shape[0], "gate_up: expected as many experts as down")
    expect(gate_up.shape[2] == x.shape[1], f"gate_up: expected {x.shape[1]} columns")
    expect(down.shape[1] == x.shape[1], f"down: expected {x.shape[1]} rows of an expert")
    expect(gate_up.shape[1] == 2 * down.shape[2], "gate_up: expected twice as many rows as down's columns")


FAKES: dict[str, Callable[..., None]] = {"route_experts": _route_experts, "apply_experts": _apply_experts}
