"""o_proj_mlp, composed of three `linear`: at many tokens the products take nearly all of the time. The semaphore is not used."""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.custom_ops import validation_layers
from torchpaged.custom_ops.checks import check_dtype
from torchpaged.custom_ops.compose import compose_o_proj_mlp
from torchpaged.custom_ops.triton.config import require_launchable
from torchpaged.custom_ops.triton.linear import linear


def o_proj_mlp(
    x: Tensor, residual: Tensor, o_weight: Tensor, norm_weight: Tensor, gate_up_weight: Tensor, down_weight: Tensor, out: Tensor, *,
    norm_eps: float = 1e-6, norm_offset: float = 0.0, activation: str = "silu", semaphore: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the parts; arguments as in ``custom_ops/ops.py``, in float32, bfloat16 or float16."""
    require_launchable(x)
    check_dtype("x", x, torch.bfloat16, torch.float16, torch.float32)
    validation_layers.check_o_proj_mlp(
        x, residual, o_weight, norm_weight, gate_up_weight, down_weight, out, norm_eps=norm_eps, norm_offset=norm_offset,
        activation=activation, semaphore=semaphore)  # fmt: skip
    compose_o_proj_mlp(
        linear, x, residual, o_weight, norm_weight, gate_up_weight, down_weight, out, norm_eps, norm_offset, activation)  # fmt: skip
