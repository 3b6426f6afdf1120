"""gated_rms_norm: one program has some heads of one token."""

from typing import NamedTuple

import triton
import triton.language as tl

from torchpaged.custom_ops.state.call import GatedNormCall
from torchpaged.custom_ops.state.check import check_gated_rms_norm
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2, require_floats
from torchpaged.custom_ops.triton.records import Tokens

_TILE = 1024  # numbers of a program


class NormSizes(NamedTuple):
    """What the kernel is compiled for; ``tile``: heads of a program; ``group``: heads whose gates stand side
    by side; ``weight_head``: from the weight of one head to the next one's; ``skip_width``: of its heads."""

    heads: int
    width: int
    width_pad: int
    tile: int
    group: int
    weight_head: int
    skip_width: int
    gate_first: bool
    sigmoid: bool


@triton.jit
def gated_rms_norm_kernel(
    x, gate, weight_ptr, out, skip, skip_weight_ptr, eps, SIZES: tl.constexpr, PDL: tl.constexpr
):
    """``x``, ``out``: `Tokens`; ``gate``: `Tokens` of groups; ``skip``: `Tokens`, or none. Grid: (num_tokens,
    tiles of heads). PDL: launched early."""
    WIDTH: tl.constexpr = SIZES.width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * SIZES.tile + tl.arange(0, SIZES.tile)
    d = tl.arange(0, SIZES.width_pad)
    here = (head < SIZES.heads)[:, None] & (d < WIDTH)[None, :]
    at = x.ptr + token * x.token + head[:, None] * x.head + d[None, :]
    y = tl.load(at, mask=here, other=0.0).to(tl.float32)
    group, place = head // SIZES.group, head % SIZES.group * WIDTH
    at = gate.ptr + token * gate.token + (group * gate.head + place)[:, None] + d[None, :]
    z = tl.load(at, mask=here, other=0.0).to(tl.float32)
    z = (1.0 if SIZES.sigmoid else z) / (1.0 + tl.exp(-z))
    at = weight_ptr + head[:, None] * SIZES.weight_head + d[None, :]
    weight = tl.load(at, mask=here, other=0.0).to(tl.float32)
    if skip.ptr is not None:
        column = head[:, None] * WIDTH + d[None, :]
        of, place = column // SIZES.skip_width, column % SIZES.skip_width
        at = skip.ptr + token * skip.token + of * skip.head + place
        factor = tl.load(skip_weight_ptr + of, mask=here, other=0.0).to(tl.float32)
        y += factor * tl.load(at, mask=here, other=0.0).to(tl.float32)
    if SIZES.gate_first:
        y *= z
    y = y * tl.rsqrt(tl.sum(y * y, axis=1) / WIDTH + eps)[:, None] * weight
    if not SIZES.gate_first:
        y *= z
    at = out.ptr + token * out.token + head[:, None] * out.head + d[None, :]
    tl.store(at, y.to(out.ptr.dtype.element_ty), mask=here)


def gated_rms_norm(call: GatedNormCall) -> None:
    """Launch; arguments as in ``custom_ops/state/schema.py``, in float32, bfloat16 or float16."""
    require_floats(x=call.x)
    check_gated_rms_norm(call)
    num_tokens, num_heads, width = call.x.shape
    if not call.x.numel():
        return
    padded = next_power_of_2(width)
    tile = min(next_power_of_2(num_heads), max(_TILE // padded, 1))
    launch_kernel(
        gated_rms_norm_kernel,
        (num_tokens, triton.cdiv(num_heads, tile)),
        *(Tokens.of(call.x), Tokens.of(call.gate), call.weight, Tokens.of(call.out)),
        *(Tokens.of(call.skip), call.skip_weight, call.eps),
        SIZES=NormSizes(
            *(num_heads, width, padded, tile, call.gate.shape[2] // width),
            weight_head=call.weight.stride(0) if call.weight.dim() == 2 else 0,
            skip_width=1 if call.skip is None else call.skip.shape[2],
            gate_first=call.gate_first,
            sigmoid=call.activation == "sigmoid",
        ),
        num_warps=8 if padded > 2048 else 4,
        **early_launch(call.x.device),
    )
