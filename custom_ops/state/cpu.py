"""delta_step and mamba2_step on a CPU: the native kernels of their convolution and state."""

import torch

from torchpaged.custom_ops.state.call import DeltaStepCall, Mamba2StepCall
from torchpaged.custom_ops.state.check_steps import check_delta_step, check_mamba2_step


def delta_step(call: DeltaStepCall) -> None:
    """Arguments: ``custom_ops/state/schema.py``."""
    check_delta_step(call)
    ops = torch.ops.torchpaged
    conv, gates, attention, norm = (part._asdict() for part in call.parts())
    ops.causal_conv.cpu(**conv)
    ops.delta_gates.cpu(**gates)
    ops.linear_attention.cpu(**attention)
    ops.gated_rms_norm.cpu(**norm)


def mamba2_step(call: Mamba2StepCall) -> None:
    """Arguments: ``custom_ops/state/schema.py``."""
    check_mamba2_step(call)
    ops = torch.ops.torchpaged
    conv, gates, attention = call.parts()
    ops.causal_conv.cpu(**conv._asdict())
    ops.delta_gates.cpu(**gates._asdict())
    ops.linear_attention.cpu(**attention._asdict())
    call.end(attention)
