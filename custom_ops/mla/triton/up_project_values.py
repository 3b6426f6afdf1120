"""up_project_values: the value's up-projections of the latents that each head has summed.

For few tokens of 16 bits one kernel: a program multiplies a tile of a head's rows, whole and read before the
kernels ahead have ended (docs/stream_order.md), by the tokens, 16 at a time. Everything else is a batched
product of torch's.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops import ahead
from torchpaged.custom_ops.mla.check import check_up_project_values
from torchpaged.custom_ops.triton.interpreter import as_numbers
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2, require_floats
from torchpaged.custom_ops.triton.records import Tokens

MAX_TOKENS = 64
_NUMBERS = 8192  # of a head's weight, in the registers of a program


class ValueSizes(NamedTuple):
    """What the kernel is compiled for; ``rows``: of a tile, of ``tokens`` at a time."""

    rank: int
    rank_pad: int
    width: int
    rows: int
    tokens: int


@triton.jit
def up_project_values_kernel(latents, weight, out, num_tokens, SIZES: tl.constexpr, PDL: tl.constexpr):
    """``latents``, ``out``: `Tokens`; ``weight``: `Tokens`, of heads and their rows. Grid: (heads x tiles of
    rows,)."""
    ROWS: tl.constexpr = SIZES.rows
    WIDTH: tl.constexpr = SIZES.width
    TOKENS: tl.constexpr = SIZES.tokens
    TILES: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = (tl.program_id(0) // TILES).to(tl.int64)
    row = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, SIZES.rank_pad)
    here = r < SIZES.rank
    rows = weight.ptr + head * weight.token + tl.minimum(row, WIDTH - 1)[:, None] * weight.head
    w = tl.load(rows + r[None, :], mask=here[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for first in tl.range(0, num_tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        real = token < num_tokens
        at = latents.ptr + token.to(tl.int64)[:, None] * latents.token + head * latents.head + r[None, :]
        x = tl.load(at, mask=real[:, None] & here[None, :], other=0.0)
        y = tl.dot(as_numbers(w), tl.trans(as_numbers(x)), input_precision="ieee")
        place = out.ptr + token.to(tl.int64)[None, :] * out.token + head * out.head + row[:, None]
        tl.store(place, y.to(out.ptr.dtype.element_ty), mask=real[None, :] & (row < WIDTH)[:, None])


def up_project_values(latents: Tensor, up_values: Tensor, out: Tensor) -> None:
    """Launch; arguments as in ``custom_ops/mla/schema.py``, in float32, bfloat16 or float16."""
    require_floats(latents=latents)
    check_up_project_values(latents, up_values, out)
    (num_tokens, num_heads, rank), width = latents.shape, up_values.shape[1]
    if num_tokens > MAX_TOKENS or latents.dtype == torch.float32:
        if ahead.here() is None:  # else it would mean nothing
            product = torch.bmm(latents.detach().transpose(0, 1), up_values.detach().transpose(1, 2))
            out.copy_(product.transpose(0, 1))
        return
    if not num_tokens:
        return
    rank_pad = next_power_of_2(max(rank, 16))
    rows = max(16, min(next_power_of_2(width), _NUMBERS // rank_pad))
    launch_kernel(
        up_project_values_kernel,
        (num_heads * -(-width // rows),),
        *(Tokens.of(latents), Tokens.of(up_values), Tokens.of(out), num_tokens),
        SIZES=ValueSizes(rank=rank, rank_pad=rank_pad, width=width, rows=rows, tokens=16),
        num_warps=4,
        **early_launch(latents.device),
    )
