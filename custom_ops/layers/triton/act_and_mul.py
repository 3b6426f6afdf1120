"""act_and_mul: ``activation(gate) * up``, elementwise; one program takes a piece of one token's row.

Computed in float32, rounded once. 16 bytes per lane for 16-bit dtypes.
"""

import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.layers.check import check_act_and_mul
from torchpaged.custom_ops.triton.activate import activate
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import next_power_of_2, require_floats
from torchpaged.custom_ops.triton.records import Matrix

_PIECE = 1024  # numbers per program: 4 warps of 8 per lane


@triton.jit
def act_and_mul_kernel(gate_up, out, WIDTH: tl.constexpr, PIECE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Rows: `Matrix`. Grid: (num_tokens, pieces of a row)."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    here = d < WIDTH
    gate = tl.load(gate_up.ptr + token * gate_up.row + d, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up.ptr + token * gate_up.row + WIDTH + d, mask=here, other=0.0).to(tl.float32)
    y = (activate(gate, ACTIVATION) * up).to(out.ptr.dtype.element_ty)
    tl.store(out.ptr + token * out.row + d, y, mask=here)


def launch(gate_up: Tensor, out: Tensor, activation: str) -> None:
    """Launch without checks: arguments as in ``custom_ops/layers/schema.py``."""
    tokens, width = out.shape
    piece = min(_PIECE, next_power_of_2(width))
    if tokens:
        launch_kernel(
            act_and_mul_kernel,
            (tokens, -(-width // piece)),
            Matrix.of(gate_up),
            Matrix.of(out),
            WIDTH=width,
            PIECE=piece,
            ACTIVATION=activation,
            num_warps=4,
        )


def act_and_mul(gate_up: Tensor, out: Tensor, *, activation: str = "silu") -> None:
    """Launch `act_and_mul_kernel`; arguments as in ``custom_ops/layers/schema.py``, in float32, bfloat16
    or float16."""
    require_floats(gate_up=gate_up)
    check_act_and_mul(gate_up, out, activation=activation)
    launch(gate_up, out, activation)
