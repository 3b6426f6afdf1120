"""gate_heads: ``x * sigmoid(gate)`` of attention's output; one program has some heads of one token.

It starts early and lets the product behind it start, which reads its weights meanwhile; two kernels of
torch's would each begin when the one ahead has ended.
"""

import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.layers.check import check_gate_heads
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2, require_floats
from torchpaged.custom_ops.triton.records import Tokens

_TILE = 1024  # numbers of a program: 4 warps of 8 per lane


@triton.jit
def gate_heads_kernel(
    x,
    gate,
    out,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    OF_HEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """All: `Tokens`. Grid: (num_tokens, tiles of heads). OF_HEAD: a gate is one number of a head."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    d = tl.arange(0, WIDTH_PAD)
    here = (head < HEADS)[:, None] & (d < WIDTH)[None, :]
    y = tl.load(x.ptr + token * x.token + head[:, None] * x.head + d[None, :], mask=here, other=0.0)
    if OF_HEAD:
        z = tl.load(gate.ptr + token * gate.token + head * gate.head, mask=head < HEADS, other=0.0)[:, None]
    else:
        at = gate.ptr + token * gate.token + head[:, None] * gate.head + d[None, :]
        z = tl.load(at, mask=here, other=0.0)
    y = y.to(tl.float32) / (1.0 + tl.exp(-z.to(tl.float32)))
    at = out.ptr + token * out.token + head[:, None] * out.head + d[None, :]
    tl.store(at, y.to(out.ptr.dtype.element_ty), mask=here)


def gate_heads(x: Tensor, gate: Tensor, out: Tensor) -> None:
    """Launch; arguments as in ``custom_ops/layers/schema.py``, in float32, bfloat16 or float16."""
    require_floats(x=x)
    check_gate_heads(x, gate, out)
    num_tokens, num_heads, width = x.shape
    if not x.numel():
        return
    padded = next_power_of_2(width)
    tile = min(next_power_of_2(num_heads), max(_TILE // padded, 1))
    launch_kernel(
        gate_heads_kernel,
        (num_tokens, triton.cdiv(num_heads, tile)),
        *(Tokens.of(x), Tokens.of(gate), Tokens.of(out)),
        HEADS=num_heads,
        WIDTH=width,
        WIDTH_PAD=padded,
        TILE_HEADS=tile,
        OF_HEAD=gate.shape[2] == 1,
        num_warps=4,
        **early_launch(x.device),
    )
