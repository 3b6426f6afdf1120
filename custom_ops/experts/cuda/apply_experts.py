"""apply_experts of the ``cuda`` backend: few tokens by kernels for Hopper, all else by Triton's."""

from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.cuda.routes import hopper_or_triton
from torchpaged.custom_ops.experts.call import ExpertsCall
from torchpaged.custom_ops.experts.check import check_apply_experts
from torchpaged.custom_ops.experts.cuda.few_experts import apply_few, why_not


def apply_experts(call: ExpertsCall) -> None:
    """Launch; arguments as in ``custom_ops/experts/schema.py``."""
    hopper_or_triton(
        call,
        call.x.device,
        route=lambda call: why_not(call, gpu.capability(call.x.device.index or 0)),
        check=check_apply_experts,
        launch=apply_few,
        triton="torchpaged.custom_ops.experts.triton.apply_experts",
    )
