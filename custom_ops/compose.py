"""Ops made of other ops of the same backend, for what it has no kernel of its own for.

No checks here: the caller has made them. What a part hands on is rounded to x's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def compose_o_proj_mlp(
    linear: Callable[..., None], x: Tensor, residual: Tensor, o_weight: Tensor, norm_weight: Tensor, gate_up_weight: Tensor,
    down_weight: Tensor, out: Tensor, norm_eps: float, norm_offset: float, activation: str,
) -> None:  # fmt: skip
    """``o_proj_mlp`` in three calls of ``linear``, the op's function in the backend; arguments as in ``custom_ops/ops.py``."""
    if not x.shape[0]:
        return
    h, gated = x.new_empty(out.shape), x.new_empty(x.shape[0], down_weight.shape[1])
    linear(x, o_weight, h, residual=residual)
    linear(h, gate_up_weight, gated, norm_weight=norm_weight, norm_eps=norm_eps, norm_offset=norm_offset, activation=activation)
    linear(gated, down_weight, out, residual=h)
