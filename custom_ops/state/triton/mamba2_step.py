"""mamba2_step: the kernels of its parts, one after the other; the last adds the skip and gates."""

from collections.abc import Callable

import triton
import triton.language as tl

from torchpaged.custom_ops.state.call import LinearAttentionCall, Mamba2StepCall
from torchpaged.custom_ops.state.check_steps import check_mamba2_step
from torchpaged.custom_ops.state.triton.causal_conv import causal_conv
from torchpaged.custom_ops.state.triton.delta_gates import delta_gates
from torchpaged.custom_ops.state.triton.linear_attention import linear_attention
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2, require_launchable
from torchpaged.custom_ops.triton.records import Tokens

_TILE = 1024  # numbers of a program


@triton.jit
def skip_and_gate_kernel(
    x,
    skip,
    skip_weight_ptr,
    gate,
    out,
    NUMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """``x``, ``skip``, ``out``: `Tokens` of heads of WIDTH; ``gate``: likewise, or none. Grid: (num_tokens,
    tiles of NUMBERS). PDL: launched early."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = n < NUMBERS
    head, d = n // WIDTH, n % WIDTH
    y = tl.load(x.ptr + token * x.token + head * x.head + d, mask=here, other=0.0).to(tl.float32)
    v = tl.load(skip.ptr + token * skip.token + head * skip.head + d, mask=here, other=0.0).to(tl.float32)
    y += tl.load(skip_weight_ptr + head, mask=here, other=0.0).to(tl.float32) * v
    if gate.ptr is not None:
        at = gate.ptr + token * gate.token + head * gate.head + d
        z = tl.load(at, mask=here, other=0.0).to(tl.float32)
        y *= z / (1.0 + tl.exp(-z))
    tl.store(out.ptr + token * out.token + head * out.head + d, y.to(out.ptr.dtype.element_ty), mask=here)


def mamba2_step(call: Mamba2StepCall) -> None:
    """Launch; arguments as in ``custom_ops/state/schema.py``, in float32, bfloat16 or float16."""
    require_launchable(call.x)
    check_mamba2_step(call)
    run_parts(call, linear_attention)


def run_parts(call: Mamba2StepCall, attention: Callable[[LinearAttentionCall], None]) -> None:
    """A checked call, with a backend's own ``linear_attention``."""
    conv, gates, attended = call.parts()
    causal_conv(conv)
    delta_gates(gates)
    attention(attended)
    num_tokens, num_heads, width = call.out.shape
    if not call.out.numel():
        return
    tile = min(next_power_of_2(num_heads * width), _TILE)
    launch_kernel(
        skip_and_gate_kernel,
        (num_tokens, triton.cdiv(num_heads * width, tile)),
        *(Tokens.of(attended.out), Tokens.of(attended.v), call.skip_weight, Tokens.of(call.gate)),
        Tokens.of(call.out),
        NUMBERS=num_heads * width,
        WIDTH=width,
        TILE=tile,
        num_warps=4,
        **early_launch(call.out.device),
    )
