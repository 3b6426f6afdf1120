"""apply_experts of several tokens (one_token.py: of one): three kernels, of which the first two read each
chosen expert's weights once.

A program takes an expert by one of the pairs (token, its expert) that chose it: the first such pair leads,
the programs of the others end at once. So nothing is sorted, and no count comes to the host. Tokens are the
columns of a tile, weights its rows: tensor cores multiply few tokens by many rows. The first kernel gives the
inner numbers of every pair, the second each pair's output in float32, the third adds those of a token, in the
order of its choices. The shared expert's programs come first: with many inner numbers, they take the longest.

Legend: R rows of weights of a tile, D of their numbers, T tokens. ``SIZES``: `Sizes`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torchpaged.custom_ops.experts.call import ExpertsCall
from torchpaged.custom_ops.experts.check import check_apply_experts
from torchpaged.custom_ops.experts.triton import one_token
from torchpaged.custom_ops.triton import launching
from torchpaged.custom_ops.triton.activate import activate
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2, require_floats
from torchpaged.custom_ops.triton.records import Matrix, Tokens


@triton.jit
def _loaded(rows, real, D: tl.constexpr, start, WIDTH: tl.constexpr):
    """Numbers ``start`` to ``start + D`` of rows of ``WIDTH``, 0 behind their ends and in those not real;
    ``real`` None: all are."""
    inside = None if real is None else real[:, None]
    if WIDTH % D != 0:
        here = (start + tl.arange(0, D) < WIDTH)[None, :]
        inside = here if real is None else inside & here
    return tl.load(rows + start, mask=inside, other=None if inside is None else 0.0)


@triton.jit
def _gate_up(x, tokens, real, gate_ptr, row, n, INNER: tl.constexpr, SIZES: tl.constexpr):
    """``activation(gate) * up`` of rows ``n`` of one expert with INNER of each, ``[R, T]``."""
    D: tl.constexpr = SIZES.depth
    WIDTH: tl.constexpr = SIZES.hidden
    R: tl.constexpr = SIZES.rows
    T: tl.constexpr = SIZES.tokens
    STAGES: tl.constexpr = SIZES.stages
    k = tl.arange(0, D)
    rows = gate_ptr + tl.minimum(n, INNER - 1).to(tl.int64)[:, None] * row + k[None, :]
    inputs = x.ptr + tokens.to(tl.int64)[:, None] * x.row + k[None, :]
    gate = tl.zeros([R, T], tl.float32)
    up = tl.zeros([R, T], tl.float32)
    for start in tl.range(0, WIDTH, D, num_stages=STAGES):
        y = tl.trans(_loaded(inputs, real, D, start, WIDTH))
        gate = tl.dot(_loaded(rows, None, D, start, WIDTH), y, gate, input_precision="ieee")
        up = tl.dot(_loaded(rows + INNER * row, None, D, start, WIDTH), y, up, input_precision="ieee")
    ACTIVATION: tl.constexpr = SIZES.activation
    return activate(gate, ACTIVATION) * up


@triton.jit
def _down(inner_ptr, rows_of_inner, real, down_ptr, row, n, WIDTH: tl.constexpr, SIZES: tl.constexpr):
    """Rows ``n`` of the output of one expert with WIDTH inner numbers, ``[R, T]``."""
    D: tl.constexpr = SIZES.depth
    R: tl.constexpr = SIZES.rows
    T: tl.constexpr = SIZES.tokens
    STAGES: tl.constexpr = SIZES.stages
    k = tl.arange(0, D)
    rows = down_ptr + tl.minimum(n, SIZES.hidden - 1).to(tl.int64)[:, None] * row + k[None, :]
    inputs = inner_ptr + rows_of_inner[:, None] * WIDTH + k[None, :]
    total = tl.zeros([R, T], tl.float32)
    for start in tl.range(0, WIDTH, D, num_stages=STAGES):
        y = tl.trans(_loaded(inputs, real, D, start, WIDTH))
        total = tl.dot(_loaded(rows, None, D, start, WIDTH), y, total, input_precision="ieee")
    return total


@triton.jit
def _group(ids_ptr, pair, num_pairs, num_experts, SIZES: tl.constexpr):
    """The expert of ``pair`` and how many pairs chose it; 0 unless ``pair`` leads: is the first of them."""
    q = tl.arange(0, SIZES.pairs_pad)
    expert = tl.load(ids_ptr + pair)
    same = (tl.load(ids_ptr + q, mask=q < num_pairs, other=-1) == expert) & (q < num_pairs)
    earlier = tl.sum((same & (q < pair)).to(tl.int32), axis=0)
    leads = (earlier == 0) & (expert >= 0) & (expert < num_experts)
    return expert, tl.where(leads, tl.sum(same.to(tl.int32), axis=0), 0)


@triton.jit
def _pairs_at(ids_ptr, expert, first, num_pairs, SIZES: tl.constexpr):
    """The pairs ``first`` to ``first + T`` of those that chose ``expert``; 0 behind the last one."""
    T: tl.constexpr = SIZES.tokens
    PIECE: tl.constexpr = min(SIZES.pairs_pad, 32)
    wanted = first + tl.arange(0, T)
    pairs = tl.zeros([T], tl.int32)
    before = 0
    for start in tl.range(0, num_pairs, PIECE):
        q = start + tl.arange(0, PIECE)
        same = (tl.load(ids_ptr + q, mask=q < num_pairs, other=-1) == expert) & (q < num_pairs)
        place = before + tl.cumsum(same.to(tl.int32), axis=0) - 1
        hit = same[None, :] & (place[None, :] == wanted[:, None])
        pairs += tl.sum(tl.where(hit, q[None, :], 0), axis=1)
        before += tl.sum(same.to(tl.int32), axis=0)
    return pairs


@triton.jit
def experts_inner_kernel(
    x,
    gate_up,
    shared_gate_up,
    ids_ptr,
    inner_ptr,
    shared_inner_ptr,
    num_tokens,
    num_pairs,
    num_experts,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``inner [pairs, inner]`` and ``shared_inner [num_tokens, shared]``. Grid: (programs of the shared
    expert, then inner / R of each pair)."""
    INNER: tl.constexpr = SIZES.inner
    SHARED: tl.constexpr = SIZES.shared
    SHARED_PROGRAMS: tl.constexpr = (SHARED + SIZES.rows - 1) // SIZES.rows
    PROGRAMS: tl.constexpr = (INNER + SIZES.rows - 1) // SIZES.rows
    program = tl.program_id(0)
    j = tl.arange(0, SIZES.tokens)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if program < SHARED_PROGRAMS:
        if SHARED > 0:
            n = program * SIZES.rows + tl.arange(0, SIZES.rows)
            for first in tl.range(0, num_tokens, SIZES.tokens):
                token = first + j
                real = token < num_tokens
                y = _gate_up(x, token, real, shared_gate_up.ptr, shared_gate_up.row, n, SHARED, SIZES)
                place = shared_inner_ptr + token[None, :] * SHARED + n[:, None]
                tl.store(place, y.to(place.dtype.element_ty), mask=real[None, :] & (n[:, None] < SHARED))
    else:
        pair = (program - SHARED_PROGRAMS) // PROGRAMS
        n = (program - SHARED_PROGRAMS) % PROGRAMS * SIZES.rows + tl.arange(0, SIZES.rows)
        expert, count = _group(ids_ptr, pair, num_pairs, num_experts, SIZES)
        base = gate_up.ptr + expert.to(tl.int64) * gate_up.token
        for first in tl.range(0, count, SIZES.tokens):
            pairs = _pairs_at(ids_ptr, expert, first, num_pairs, SIZES)
            real = first + j < count
            y = _gate_up(x, pairs // SIZES.top_k, real, base, gate_up.head, n, INNER, SIZES)
            place = inner_ptr + pairs[None, :] * INNER + n[:, None]
            tl.store(place, y.to(place.dtype.element_ty), mask=real[None, :] & (n[:, None] < INNER))


@triton.jit
def experts_down_kernel(
    inner_ptr,
    shared_inner_ptr,
    down,
    shared_down,
    ids_ptr,
    parts_ptr,
    num_tokens,
    num_pairs,
    num_experts,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``parts [pairs + num_tokens, hidden]`` float32: each pair's output, then the shared expert's of each
    token. Grid: (programs of the shared expert, then hidden / R of each pair)."""
    HIDDEN: tl.constexpr = SIZES.hidden
    PROGRAMS: tl.constexpr = (HIDDEN + SIZES.rows - 1) // SIZES.rows
    SHARED_PROGRAMS: tl.constexpr = PROGRAMS if SIZES.shared > 0 else 0
    program = tl.program_id(0)
    n = program % PROGRAMS * SIZES.rows + tl.arange(0, SIZES.rows)
    j = tl.arange(0, SIZES.tokens)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if program < SHARED_PROGRAMS:
        if SIZES.shared > 0:
            for first in tl.range(0, num_tokens, SIZES.tokens):
                token = first + j
                real = token < num_tokens
                y = _down(
                    shared_inner_ptr, token, real, shared_down.ptr, shared_down.row, n, SIZES.shared, SIZES
                )
                place = parts_ptr + (num_pairs + token)[None, :] * HIDDEN + n[:, None]
                tl.store(place, y, mask=real[None, :] & (n[:, None] < HIDDEN))
    else:
        pair = (program - SHARED_PROGRAMS) // PROGRAMS
        expert, count = _group(ids_ptr, pair, num_pairs, num_experts, SIZES)
        base = down.ptr + expert.to(tl.int64) * down.token
        for first in tl.range(0, count, SIZES.tokens):
            pairs = _pairs_at(ids_ptr, expert, first, num_pairs, SIZES)
            real = first + j < count
            y = _down(inner_ptr, pairs, real, base, down.head, n, SIZES.inner, SIZES)
            place = parts_ptr + pairs[None, :] * HIDDEN + n[:, None]
            tl.store(place, y, mask=real[None, :] & (n[:, None] < HIDDEN))


@triton.jit
def experts_sum_kernel(
    x,
    parts_ptr,
    ids_ptr,
    weights_ptr,
    shared_gate_ptr,
    residual,
    out,
    num_pairs,
    num_experts,
    HIDDEN_PAD: tl.constexpr,
    PIECE: tl.constexpr,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows: `Matrix`. Grid: (num_tokens, pieces of a row)."""
    HIDDEN: tl.constexpr = SIZES.hidden
    TOP_K: tl.constexpr = SIZES.top_k
    token = tl.program_id(0)
    d = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    here = d < HIDDEN
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([PIECE], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        expert = tl.load(ids_ptr + pair)
        real = (expert >= 0) & (expert < num_experts)
        part = tl.load(parts_ptr + pair * HIDDEN + d, mask=here, other=0.0)  # ahead of the id, whatever it is
        total += tl.where(real, tl.load(weights_ptr + pair) * part, 0.0)
    if SIZES.shared > 0:
        shared = tl.load(parts_ptr + (num_pairs + token) * HIDDEN + d, mask=here, other=0.0)
        if shared_gate_ptr is not None:
            k = tl.arange(0, HIDDEN_PAD)
            g = tl.load(shared_gate_ptr + k, mask=k < HIDDEN, other=0.0).to(tl.float32)
            h = tl.load(x.ptr + token.to(tl.int64) * x.row + k, mask=k < HIDDEN, other=0.0).to(tl.float32)
            shared *= tl.sigmoid(tl.sum(g * h, axis=0))
        total += shared
    if residual.ptr is not None:
        place = residual.ptr + token.to(tl.int64) * residual.row + d
        total += tl.load(place, mask=here, other=0.0).to(tl.float32)
    tl.store(out.ptr + token.to(tl.int64) * out.row + d, total.to(out.ptr.dtype.element_ty), mask=here)


class Sizes(NamedTuple):
    """What the kernels are compiled for.

    Attributes:
        inner, shared: inner numbers of an expert and of the shared one, 0 without one.
        pairs_pad: not fewer than tokens times ``top_k``, a power of 2.
        rows, depth: of a tile of weights; ``tokens``: of the other factor; ``stages``: tiles on their way.
    """

    hidden: int
    inner: int
    shared: int
    top_k: int
    activation: str
    pairs_pad: int
    rows: int
    depth: int
    tokens: int
    stages: int


def sizes_of(call: ExpertsCall) -> tuple[Sizes, Sizes]:
    """Those of the first kernel and of the second. Of few pairs each program must have more on its way."""
    num_experts, hidden, inner = call.down.shape
    pairs, top_k = call.ids.numel(), call.ids.shape[1]
    shared = 0 if call.shared_down is None else call.shared_down.shape[1]
    # of more than 8 tokens of an expert on average, many groups have more than 16
    tokens = 16 if pairs <= 8 * num_experts else 32
    tiles = ((64, 64, tokens, 4),) * 2
    if pairs <= 64 and launching.is_hopper(call.x.device):
        tiles = (64, 128, tokens, 3), (64, 64, tokens, 4)
        if pairs <= 16:
            tiles = (64, 64, tokens, 5), (64, 128, tokens, 4)
    if call.x.dtype == torch.float32:
        tiles = ((32, 32, 16, 2),) * 2
    of_call = hidden, inner, shared, top_k, call.activation, next_power_of_2(pairs)
    return Sizes(*of_call, *tiles[0]), Sizes(*of_call, *tiles[1])


def apply_experts(call: ExpertsCall) -> None:
    """Launch; arguments as in ``custom_ops/experts/schema.py``, in float32, bfloat16 or float16."""
    require_floats(x=call.x)
    check_apply_experts(call)
    if (of_token := one_token.TokenSizes.of(call)) is not None:
        one_token.launch(call, of_token)
    elif call.x.shape[0]:
        launch(call, *sizes_of(call))


def launch(call: ExpertsCall, sizes: Sizes, down_sizes: Sizes) -> None:
    """Launch without checks."""
    x, gate_up, down, ids, weights, out, _, shared_gate_up, shared_down, shared_gate, residual = call
    (tokens, hidden), num_experts, pairs = x.shape, down.shape[0], ids.numel()
    inner = x.new_empty(pairs * sizes.inner + tokens * sizes.shared)
    shared_inner = inner[pairs * sizes.inner :] if sizes.shared else None
    parts = x.new_empty(pairs + (tokens if sizes.shared else 0), hidden, dtype=torch.float32)
    options = {"num_warps": 4, **early_launch(x.device)}
    counts = tokens, pairs, num_experts
    launch_kernel(
        experts_inner_kernel,
        (-(-sizes.shared // sizes.rows) + pairs * -(-sizes.inner // sizes.rows),),
        *(Matrix.of(x), Tokens.of(gate_up), Matrix.of(shared_gate_up), ids, inner, shared_inner, *counts),
        SIZES=sizes,
        **options,
    )
    launch_kernel(
        experts_down_kernel,
        ((pairs + bool(sizes.shared)) * -(-hidden // down_sizes.rows),),
        *(inner, shared_inner, Tokens.of(down), Matrix.of(shared_down), ids, parts, *counts),
        SIZES=down_sizes,
        **options,
    )
    piece = min(512, next_power_of_2(hidden))
    launch_kernel(
        experts_sum_kernel,
        (tokens, -(-hidden // piece)),
        *(Matrix.of(x), parts, ids, weights, shared_gate, Matrix.of(residual), Matrix.of(out), pairs),
        num_experts,
        HIDDEN_PAD=next_power_of_2(hidden),
        PIECE=piece,
        SIZES=sizes,
        **options,
    )
