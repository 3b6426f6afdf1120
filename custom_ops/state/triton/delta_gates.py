"""delta_gates: one program has some heads of one token."""

import triton
import triton.language as tl

from torchpaged.custom_ops.state.call import GatesCall
from torchpaged.custom_ops.state.check import check_delta_gates
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2, require_floats
from torchpaged.custom_ops.triton.records import Matrix, Tokens

_TILE = 512  # numbers of a program


@triton.jit
def softplus(x):
    """log(1 + exp(x)). Of a small e = exp(x), 1 + e loses digits, which log(1 + e) e / ((1 + e) - 1) gives
    back: a decay next to 1 is told from 1. NaN stays NaN, of which `tl.minimum` would make 20."""
    e = tl.exp(tl.where(x > 20.0, 20.0, x))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def delta_gates_kernel(
    a,
    b,
    a_log_ptr,
    dt_bias_ptr,
    g,
    beta,
    beta_scale,
    min_step,
    max_step,
    bound,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """``a``, ``b``: `Tokens` of groups; ``g``, ``beta``: `Matrix`; ``max_step``, ``bound``: numbers or None.
    Grid: (num_tokens, tiles of columns). WIDTH: columns of a head; GROUP: heads that stand side by side. PDL:
    launched early."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = column < COLUMNS
    head = column // WIDTH
    group, place = head // GROUP, head % GROUP
    at = a.ptr + token * a.token + group * a.head + column % (GROUP * WIDTH)
    x = tl.load(at, mask=here, other=0.0).to(tl.float32)
    x += tl.load(dt_bias_ptr + column, mask=here, other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + head, mask=here, other=0.0).to(tl.float32)
    step = softplus(x)
    step = tl.where(step < min_step, min_step, step)  # comparisons: NaN stays NaN
    if max_step is not None:
        step = tl.where(step > max_step, max_step, step)
    decay = -tl.exp(a_log) * step if bound is None else bound / (1.0 + tl.exp(-tl.exp(a_log) * x))
    tl.store(g.ptr + token * g.row + column, decay, mask=here)
    if b.ptr is not None:
        first = here & (column % WIDTH == 0)
        y = tl.load(b.ptr + token * b.token + group * b.head + place, mask=first, other=0.0).to(tl.float32)
        y = beta_scale / (1.0 + tl.exp(-y))
        tl.store(beta.ptr + token * beta.row + head, y, mask=first)
    else:
        tl.store(beta.ptr + token * beta.row + column, step, mask=here)


def delta_gates(call: GatesCall) -> None:
    """Launch; arguments as in ``custom_ops/state/schema.py``, in float32, bfloat16 or float16."""
    require_floats(a=call.a)
    check_delta_gates(call)
    num_tokens, num_groups, group = call.a.shape
    columns = num_groups * group
    if not num_tokens or not columns:
        return
    width = columns // call.a_log.shape[0]
    tile = min(next_power_of_2(columns), _TILE)
    launch_kernel(
        delta_gates_kernel,
        (num_tokens, triton.cdiv(columns, tile)),
        *(Tokens.of(call.a), Tokens.of(call.b), call.a_log, call.dt_bias, Matrix.of(call.g)),
        *(Matrix.of(call.beta), call.beta_scale, call.min_step, call.max_step, call.bound),
        COLUMNS=columns,
        WIDTH=width,
        GROUP=group // width,
        TILE=tile,
        num_warps=max(tile // 128, 1),
        **early_launch(call.a.device),
    )
