"""Calls of the ops of mixtures of experts, as records: made once where torch's flat arguments end
(registry.py). Shapes, dtypes and meanings: schema.py."""

from typing import NamedTuple

from torch import Tensor


class RouteCall(NamedTuple):
    """The arguments of ``route_experts``, with the schema's defaults."""

    x: Tensor
    weight: Tensor
    ids: Tensor
    weights: Tensor
    bias: Tensor | None = None
    scoring: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    norm_eps: float | None = None
    scale: float = 1.0


class ExpertsCall(NamedTuple):
    """The arguments of ``apply_experts``, with the schema's defaults."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    weights: Tensor
    out: Tensor
    activation: str = "silu"
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_gate: Tensor | None = None
    residual: Tensor | None = None
