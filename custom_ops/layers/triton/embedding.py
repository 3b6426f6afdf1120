"""embedding: one program copies the row of one token, and starts early.

As a kernel of torch's it would begin only when the kernel ahead has ended, and keep the first product of a
step from reading its weights meanwhile. It waits first and lets its dependents start then
(docs/stream_order.md).
"""

import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.layers.check import check_embedding
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2, require_floats
from torchpaged.custom_ops.triton.records import Matrix


@triton.jit
def embedding_kernel(
    ids_ptr,
    weight,
    scale_ptr,
    out,
    vocab_size,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows: `Matrix`. Grid: (num_tokens,). An id outside the table gives NaN. scale_ptr may be None."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH_PAD)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(ids_ptr + token)
    known = (row >= 0) & (row < vocab_size)
    # A select: the interpreter of Triton 3.9 takes no mask that a scalar comparison is spread into.
    x = tl.load(weight.ptr + row * weight.row + d, mask=tl.where(known, d < WIDTH, False), other=float("nan"))
    if scale_ptr is not None:
        x = (x.to(tl.float32) * tl.load(scale_ptr).to(x.dtype).to(tl.float32)).to(x.dtype)
    tl.store(out.ptr + token * out.row + d, x, mask=d < WIDTH)


def num_warps_of(width: int, itemsize: int) -> int:
    """16 bytes per lane and load, at most 16 warps."""
    return min(max(next_power_of_2(width) * itemsize // (32 * 16), 1), 16)


def embedding(input_ids: Tensor, weight: Tensor, out: Tensor, *, scale: Tensor | None = None) -> None:
    """Launch; arguments as in ``custom_ops/layers/schema.py``, in float32, bfloat16 or float16."""
    require_floats(weight=weight)
    check_embedding(input_ids, weight, out, scale=scale)
    tokens, width = out.shape
    if tokens:
        launch_kernel(
            embedding_kernel,
            (tokens,),
            *(input_ids, Matrix.of(weight), scale, Matrix.of(out), weight.shape[0]),
            WIDTH=width,
            WIDTH_PAD=next_power_of_2(width),
            num_warps=num_warps_of(width, weight.element_size()),
            **early_launch(input_ids.device),
        )
