"""o_proj_mlp of the ``cuda`` backend, composed of three `linear`: one launch each at up to 64 tokens. The semaphore is not used.

The weights and ``norm_weight`` are constants, which a kernel reads before earlier kernels on the stream have finished: see linear.py.
"""

from __future__ import annotations

from torch import Tensor

from torchpaged.custom_ops import validation_layers
from torchpaged.custom_ops.compose import compose_o_proj_mlp
from torchpaged.custom_ops.cuda.linear import linear
from torchpaged.custom_ops.errors import BackendUnavailableError


def o_proj_mlp(
    x: Tensor, residual: Tensor, o_weight: Tensor, norm_weight: Tensor, gate_up_weight: Tensor, down_weight: Tensor, out: Tensor, *,
    norm_eps: float = 1e-6, norm_offset: float = 0.0, activation: str = "silu", semaphore: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch; arguments as in ``custom_ops/ops.py``."""
    if x.device.type != "cuda":
        raise BackendUnavailableError(f"backend 'cuda': its kernels run on an NVIDIA GPU, got tensors on {x.device.type}")
    validation_layers.check_o_proj_mlp(
        x, residual, o_weight, norm_weight, gate_up_weight, down_weight, out, norm_eps=norm_eps, norm_offset=norm_offset,
        activation=activation, semaphore=semaphore)  # fmt: skip
    compose_o_proj_mlp(
        linear, x, residual, o_weight, norm_weight, gate_up_weight, down_weight, out, norm_eps, norm_offset, activation)  # fmt: skip
