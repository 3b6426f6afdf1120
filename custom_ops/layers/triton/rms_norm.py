"""rms_norm: one program norms one token's row, with the residual adds before and after it.

A row stays in registers between the sum of squares and the store, so that each number is read and written
once. Everything is computed in float32 and rounded once. The weight is read early (docs/stream_order.md).
"""

import triton
import triton.language as tl

from torchpaged.custom_ops.layers.call import NormCall
from torchpaged.custom_ops.layers.check import check_rms_norm
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2, require_floats
from torchpaged.custom_ops.triton.records import Matrix


@triton.jit
def rms_norm_kernel(
    x,
    weight_ptr,
    out,
    residual,
    post_residual,
    eps,
    offset,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows: `Matrix`. Grid: (num_tokens,). A pointer that is None leaves its step out."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH_PAD)
    here = d < WIDTH
    w = tl.load(weight_ptr + d, mask=here, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    z = tl.load(x.ptr + token * x.row + d, mask=here, other=0.0).to(tl.float32)
    if residual.ptr is not None:
        place = residual.ptr + token * residual.row + d
        z += tl.load(place, mask=here, other=0.0).to(tl.float32)
        tl.store(place, z.to(residual.ptr.dtype.element_ty), mask=here)
    y = z * tl.rsqrt(tl.sum(z * z, axis=0) / WIDTH + eps) * (offset + w)
    if post_residual.ptr is not None:
        place = post_residual.ptr + token * post_residual.row + d
        y += tl.load(place, mask=here, other=0.0).to(tl.float32)
    tl.store(out.ptr + token * out.row + d, y.to(out.ptr.dtype.element_ty), mask=here)


def num_warps_of(width: int) -> int:
    """Warps of a row: 16 numbers per lane, at most 16 warps."""
    return min(max(next_power_of_2(width) // 512, 1), 16)


def launch(call: NormCall) -> None:
    """Launch without checks."""
    x, weight, out, eps, offset, residual, post_residual = call
    tokens, width = x.shape
    if tokens:
        launch_kernel(
            rms_norm_kernel,
            (tokens,),
            *(Matrix.of(x), weight, *map(Matrix.of, (out, residual, post_residual)), eps, offset),
            WIDTH=width,
            WIDTH_PAD=next_power_of_2(width),
            num_warps=num_warps_of(width),
            **early_launch(x.device),
        )


def rms_norm(call: NormCall) -> None:
    """Launch `rms_norm_kernel`; arguments as in ``custom_ops/layers/schema.py``, in float32, bfloat16
    or float16."""
    require_floats(x=call.x)
    check_rms_norm(call)
    launch(call)
