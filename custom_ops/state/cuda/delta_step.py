"""delta_step of the ``cuda`` backend: one launch by the Hopper kernel; what it can't take goes through the
ops that the step is made of."""

from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.cuda.routes import require_gpu
from torchpaged.custom_ops.state.call import DeltaStepCall
from torchpaged.custom_ops.state.check_steps import check_delta_step
from torchpaged.custom_ops.state.cuda import step
from torchpaged.custom_ops.state.cuda.linear_attention import linear_attention


def delta_step(call: DeltaStepCall) -> None:
    """Launch; arguments as in ``custom_ops/state/schema.py``. Every choice here depends on shapes, never on
    lengths."""
    require_gpu(call.x.device)
    check_delta_step(call)
    if route(call) is None:
        step.launch(call, step.StepSpec.of(call))
        return
    from torchpaged.custom_ops.state.triton.delta_step import run_parts  # only now: Triton loads slowly

    run_parts(call, linear_attention)


def route(call: DeltaStepCall) -> str | None:
    """Why a checked call goes through several launches, or None."""
    if not call.state_slots.numel() or not call.x.numel():
        return "no requests or no tokens"
    return step.why_not(call, gpu.capability(call.x.device.index or 0))
