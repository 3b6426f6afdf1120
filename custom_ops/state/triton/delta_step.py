"""delta_step: the kernels of its parts, one after the other."""

from collections.abc import Callable

from torchpaged.custom_ops.state.call import DeltaStepCall, LinearAttentionCall
from torchpaged.custom_ops.state.check_steps import check_delta_step
from torchpaged.custom_ops.state.triton.causal_conv import causal_conv
from torchpaged.custom_ops.state.triton.delta_gates import delta_gates
from torchpaged.custom_ops.state.triton.gated_rms_norm import gated_rms_norm
from torchpaged.custom_ops.state.triton.linear_attention import linear_attention
from torchpaged.custom_ops.triton.launching import require_launchable


def delta_step(call: DeltaStepCall) -> None:
    """Launch; arguments as in ``custom_ops/state/schema.py``, in float32, bfloat16 or float16."""
    require_launchable(call.x)
    check_delta_step(call)
    run_parts(call, linear_attention)


def run_parts(call: DeltaStepCall, attention: Callable[[LinearAttentionCall], None]) -> None:
    """A checked call, with a backend's own ``linear_attention``."""
    conv, gates, attended, norm = call.parts()
    causal_conv(conv)
    delta_gates(gates)
    attention(attended)
    gated_rms_norm(norm)
