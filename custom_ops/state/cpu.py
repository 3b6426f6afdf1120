"""delta_step on a CPU: the native kernels of its convolution and its state."""

from __future__ import annotations

import torch

from torchpaged.custom_ops.state.call import DeltaStepCall
from torchpaged.custom_ops.state.check import check_delta_step


def delta_step(call: DeltaStepCall) -> None:
    """Arguments: ``custom_ops/state/schema.py``."""
    check_delta_step(call)
    ops = torch.ops.torchpaged
    conv, gates, attention, norm = (part._asdict() for part in call.parts())
    ops.causal_conv.cpu(**conv)
    ops.delta_gates.cpu(**gates)
    ops.linear_attention.cpu(**attention)
    ops.gated_rms_norm.cpu(**norm)
