"""apply_experts of one token: two kernels that multiply rows of weights in registers.

The first gives the inner numbers of the shared expert and of each choice. A program of the second adds its
rows of all experts, the shared one's first, then in the order of the choice. Norm and router ahead read few
bytes, so the shared expert's weights, which are constants, are read before the wait (docs/stream_order.md):
its programs come first in the one kernel, and each program of the other begins with it.

``SIZES``: `TokenSizes`.
"""

from typing import NamedTuple, Self

import triton
import triton.language as tl

from torchpaged.custom_ops.experts.call import ExpertsCall
from torchpaged.custom_ops.triton.activate import activate
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2
from torchpaged.custom_ops.triton.records import Matrix, Tokens

_NUMBERS = 4096, 16384  # of a tile of weights in the registers of 4 warps and of 8


class TokenSizes(NamedTuple):
    """What the kernels are compiled for; pads are powers of 2.

    Attributes:
        inner, shared: inner numbers of an expert and of the shared one, 0 without one.
        rows, out_rows: of a tile of weights of the first kernel (gate, and as many of up) and of the second.
    """

    hidden: int
    hidden_pad: int
    inner: int
    inner_pad: int
    shared: int
    shared_pad: int
    top_k: int
    activation: str
    rows: int
    out_rows: int

    @classmethod
    def of(cls, call: ExpertsCall) -> Self | None:
        """Of a call of one token; None: rows are too long."""
        _, hidden, inner = call.down.shape
        shared = 0 if call.shared_down is None else call.shared_down.shape[1]
        pads = next_power_of_2(hidden), next_power_of_2(inner), next_power_of_2(max(shared, 1))
        if call.x.shape[0] != 1 or pads[0] > 8192 or pads[1] > 2048 or pads[2] > 4096:
            return None
        widths = hidden, pads[0], inner, pads[1], shared, pads[2]
        rows, out_rows = max(_NUMBERS[0] // pads[0], 1), min(_NUMBERS[1] // pads[1], 16)
        return cls(*widths, call.ids.shape[1], call.activation, rows, out_rows)


@triton.jit
def _product(weights, numbers):
    return tl.sum(weights.to(tl.float32) * numbers.to(tl.float32)[None, :], axis=1)


@triton.jit
def token_inner_kernel(
    x_ptr, gate_up, shared_gate_up, ids_ptr, inner_ptr, num_experts, SIZES: tl.constexpr, PDL: tl.constexpr
):
    """``inner [top_k * inner + shared]``. Grid: (programs of the shared expert, then inner / rows of each
    pair,)."""
    ROWS: tl.constexpr = SIZES.rows
    HIDDEN: tl.constexpr = SIZES.hidden
    HIDDEN_PAD: tl.constexpr = SIZES.hidden_pad
    INNER: tl.constexpr = SIZES.inner
    SHARED: tl.constexpr = SIZES.shared
    TOP_K: tl.constexpr = SIZES.top_k
    ACTIVATION: tl.constexpr = SIZES.activation
    SHARED_PROGRAMS: tl.constexpr = (SHARED + ROWS - 1) // ROWS
    PROGRAMS: tl.constexpr = (INNER + ROWS - 1) // ROWS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    k = tl.arange(0, HIDDEN_PAD)
    here = k < HIDDEN
    if program >= SHARED_PROGRAMS:
        if PDL:
            tl.extra.cuda.gdc_wait()
        pair = (program - SHARED_PROGRAMS) // PROGRAMS
        n = (program - SHARED_PROGRAMS) % PROGRAMS * ROWS + tl.arange(0, ROWS)
        expert = tl.load(ids_ptr + pair)
        if (expert >= 0) & (expert < num_experts):
            row = tl.minimum(n, INNER - 1).to(tl.int64)[:, None] * gate_up.head
            rows = gate_up.ptr + expert.to(tl.int64) * gate_up.token + row + k[None, :]
            gate = tl.load(rows, mask=here[None, :], other=0.0)
            up = tl.load(rows + INNER * gate_up.head, mask=here[None, :], other=0.0)
            x = tl.load(x_ptr + k, mask=here, other=0.0)
            y = activate(_product(gate, x), ACTIVATION) * _product(up, x)
            tl.store(inner_ptr + pair * INNER + n, y.to(inner_ptr.dtype.element_ty), mask=n < INNER)
    elif SHARED > 0:
        n = program * ROWS + tl.arange(0, ROWS)
        row = tl.minimum(n, SHARED - 1).to(tl.int64)[:, None] * shared_gate_up.row
        rows = shared_gate_up.ptr + row + k[None, :]
        gate = tl.load(rows, mask=here[None, :], other=0.0)
        up = tl.load(rows + SHARED * shared_gate_up.row, mask=here[None, :], other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_ptr + k, mask=here, other=0.0)
        y = activate(_product(gate, x), ACTIVATION) * _product(up, x)
        tl.store(inner_ptr + TOP_K * INNER + n, y.to(inner_ptr.dtype.element_ty), mask=n < SHARED)


@triton.jit
def _rows_of(down, ids_ptr, j, row, k, num_experts, INNER: tl.constexpr):
    """Of the weights of the expert of choice ``j``; 0 where there is none."""
    expert = tl.load(ids_ptr + j)
    real = (expert >= 0) & (expert < num_experts)
    rows = down.ptr + expert.to(tl.int64) * down.token + row[:, None] * down.head + k[None, :]
    return tl.load(rows, mask=(real & (k < INNER))[None, :], other=0.0), real


@triton.jit
def token_out_kernel(
    x_ptr,
    inner_ptr,
    down,
    shared_down,
    ids_ptr,
    weights_ptr,
    shared_gate_ptr,
    residual_ptr,
    out_ptr,
    num_experts,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (hidden / out_rows,)."""
    ROWS: tl.constexpr = SIZES.out_rows
    HIDDEN: tl.constexpr = SIZES.hidden
    INNER: tl.constexpr = SIZES.inner
    SHARED: tl.constexpr = SIZES.shared
    TOP_K: tl.constexpr = SIZES.top_k
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, HIDDEN - 1).to(tl.int64)
    s = tl.arange(0, SIZES.shared_pad)
    if SHARED > 0:
        rows = shared_down.ptr + row[:, None] * shared_down.row + s[None, :]
        of_shared = tl.load(rows, mask=(s < SHARED)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    k = tl.arange(0, SIZES.inner_pad)
    total = tl.zeros([ROWS], tl.float32)
    if PDL:  # the shared expert's weights came before the wait; without PDL both together spill on sm_80
        w, real = _rows_of(down, ids_ptr, 0, row, k, num_experts, INNER)
    if SHARED > 0:
        total += _product(of_shared, tl.load(inner_ptr + TOP_K * INNER + s, mask=s < SHARED, other=0.0))
    if not PDL:
        w, real = _rows_of(down, ids_ptr, 0, row, k, num_experts, INNER)
    if shared_gate_ptr is not None:
        d = tl.arange(0, SIZES.hidden_pad)
        g = tl.load(shared_gate_ptr + d, mask=d < HIDDEN, other=0.0).to(tl.float32)
        total *= tl.sigmoid(tl.sum(g * tl.load(x_ptr + d, mask=d < HIDDEN, other=0.0).to(tl.float32), 0))
    for j in tl.static_range(TOP_K):
        if j + 1 < TOP_K:  # asked for ahead of the product before
            w_next, real_next = _rows_of(down, ids_ptr, j + 1, row, k, num_experts, INNER)
        numbers = tl.load(inner_ptr + j * INNER + k, mask=real & (k < INNER), other=0.0)
        total += tl.where(real, tl.load(weights_ptr + j) * _product(w, numbers), 0.0)
        if j + 1 < TOP_K:
            w, real = w_next, real_next
    if residual_ptr is not None:
        total += tl.load(residual_ptr + n, mask=n < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=n < HIDDEN)


def launch(call: ExpertsCall, sizes: TokenSizes) -> None:
    """Launch without checks."""
    x, gate_up, down, ids, weights, out, _, shared_gate_up, shared_down, shared_gate, residual = call
    inner = x.new_empty(sizes.top_k * sizes.inner + sizes.shared)
    programs = -(-sizes.shared // sizes.rows) + sizes.top_k * -(-sizes.inner // sizes.rows)
    options = {"SIZES": sizes, **early_launch(x.device)}
    launch_kernel(
        token_inner_kernel,
        (programs,),
        *(x, Tokens.of(gate_up), Matrix.of(shared_gate_up), ids, inner, down.shape[0]),
        num_warps=4,
        **options,
    )
    launch_kernel(
        token_out_kernel,
        (-(-sizes.hidden // sizes.out_rows),),
        *(x, inner, Tokens.of(down), Matrix.of(shared_down), ids, weights, shared_gate, residual, out),
        down.shape[0],
        num_warps=8,
        **options,
    )
