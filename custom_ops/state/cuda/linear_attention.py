"""linear_attention of the ``cuda`` backend: single tokens by the Hopper kernel; all others, and
everything that it can't take, by the Triton kernels."""

from __future__ import annotations

from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.cuda.routes import hopper_or_triton
from torchpaged.custom_ops.state.call import LinearAttentionCall
from torchpaged.custom_ops.state.check import check_linear_attention
from torchpaged.custom_ops.state.cuda import decode


def linear_attention(call: LinearAttentionCall) -> None:
    """Launch; arguments as in ``custom_ops/state/schema.py``. Every choice here depends on shapes, never on
    lengths."""
    hopper_or_triton(
        call,
        call.v.device,
        route=route,
        check=check_linear_attention,
        launch=lambda call: decode.launch(call, decode.StateSpec.of(call)),
        triton="torchpaged.custom_ops.state.triton.linear_attention",
    )


def route(call: LinearAttentionCall) -> str | None:
    """Why a call goes to Triton, or None: from shapes, dtypes, strides and addresses alone."""
    if any(x.dim() != 3 for x in (call.q, call.k, call.v, call.out)) or call.state.dim() != 4:
        return "shapes that the check refuses"
    if not call.state_slots.numel() or not call.v.numel():
        return "no requests or no tokens"
    return decode.why_not(call, gpu.capability(call.v.device.index or 0))
