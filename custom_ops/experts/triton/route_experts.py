"""route_experts: the logits of a few experts and one token in each program, then one program per token that
chooses.

Both wait first and let their dependents start then; the first reads the router's weight, a constant, before.
"""

import torch
import triton
import triton.language as tl

from torchpaged.custom_ops.experts.call import RouteCall
from torchpaged.custom_ops.experts.check import check_route_experts
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2, require_floats
from torchpaged.custom_ops.triton.records import Matrix

_NUMBERS = 8192  # of the router's weight, in the registers of a program


@triton.jit
def router_logits_kernel(
    x,
    weight,
    logits_ptr,
    num_experts,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """``logits [T, num_experts]`` float32. Rows: `Matrix`. Grid: (num_tokens, num_experts / ROWS)."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(expert, num_experts - 1).to(tl.int64) * weight.row
    d = tl.arange(0, WIDTH_PAD)
    w = tl.load(weight.ptr + rows[:, None] + d[None, :], mask=(d < WIDTH)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    numbers = tl.load(x.ptr + token * x.row + d, mask=d < WIDTH, other=0.0)
    logits = tl.sum(w.to(tl.float32) * numbers.to(tl.float32)[None, :], axis=1)
    tl.store(logits_ptr + token * num_experts + expert, logits, mask=expert < num_experts)


@triton.jit
def choose_experts_kernel(
    logits_ptr,
    bias_ptr,
    ids,
    weights,
    norm_eps,
    scale,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Experts as ``[groups, experts of one]``. A score of NaN is chosen first, as a weight of NaN. Rows:
    `Matrix`. Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PAD)
    member = tl.arange(0, GROUP_PAD)
    here = (group[:, None] < NUM_GROUPS) & (member[None, :] < GROUP)
    expert = group[:, None] * GROUP + member[None, :]
    NONE: tl.constexpr = GROUPS_PAD * GROUP_PAD + NUM_GROUPS * GROUP
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    logits = tl.load(logits_ptr + token * (NUM_GROUPS * GROUP) + expert, mask=here, other=-float("inf"))
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        e = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = e / tl.sum(tl.sum(e, axis=1), axis=0)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + expert, mask=here, other=0.0).to(tl.float32)
    choice = tl.where(choice != choice, float("inf"), choice)
    if TOP_GROUPS < NUM_GROUPS:
        left = here
        of_group = tl.zeros([GROUPS_PAD], tl.float32)
        for _ in tl.static_range(GROUP_BEST):
            best = tl.max(tl.where(left, choice, -float("inf")), axis=1)
            of_group += best
            first = tl.min(tl.where(left & (choice == best[:, None]), expert, NONE), axis=1)
            left = left & (expert != first[:, None])
        of_group = tl.where(of_group != of_group, float("inf"), of_group)  # of NaN and -inf
        open_groups = group < NUM_GROUPS
        for _ in tl.static_range(TOP_GROUPS):
            best_group = tl.max(tl.where(open_groups, of_group, -float("inf")), axis=0)
            chosen = tl.min(tl.where(open_groups & (of_group == best_group), group, GROUPS_PAD), axis=0)
            open_groups = open_groups & (group != chosen)
        here = here & (open_groups == 0)[:, None]
    # The order of floats as integers, whose largest and smallest of a warp take one instruction each.
    bits = (choice + 0.0).to(tl.int32, bitcast=True)
    LOWEST: tl.constexpr = -0x80000000
    ALL: tl.constexpr = [GROUPS_PAD * GROUP_PAD]
    order = tl.reshape(tl.where(here, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LOWEST), ALL)
    scores, expert = tl.reshape(scores, ALL), tl.reshape(expert, ALL)
    j = tl.arange(0, TOP_K_PAD)
    found = tl.zeros([TOP_K_PAD], tl.int32)
    shares = tl.zeros([TOP_K_PAD], tl.float32)
    for n in tl.static_range(TOP_K):
        highest = tl.max(order, axis=0)
        first = tl.min(tl.where(order == highest, expert, NONE), axis=0)
        share = tl.sum(tl.where(expert == first, scores, 0.0), axis=0)
        found = tl.where(j == n, first, found)
        shares = tl.where(j == n, share, shares)
        order = tl.where(expert == first, LOWEST, order)
    if NORMS:
        shares = shares / (tl.sum(shares, axis=0) + norm_eps)
    tl.store(ids.ptr + token * ids.row + j, found, mask=j < TOP_K)
    tl.store(weights.ptr + token * weights.row + j, shares * scale, mask=j < TOP_K)


def route_experts(call: RouteCall) -> None:
    """Launch both; arguments as in ``custom_ops/experts/schema.py``, in float32, bfloat16 or float16."""
    require_floats(x=call.x)
    check_route_experts(call)
    x, weight, ids, weights, bias, scoring, num_groups, top_groups, group_best, norm_eps, scale = call
    tokens, (num_experts, width), early = x.shape[0], weight.shape, early_launch(x.device)
    if not tokens:
        return
    rows = max(1, min(4, _NUMBERS // next_power_of_2(width)))
    logits = x.new_empty(tokens, num_experts, dtype=torch.float32)
    launch_kernel(
        router_logits_kernel,
        (tokens, -(-num_experts // rows)),
        *(Matrix.of(x), Matrix.of(weight), logits, num_experts),
        WIDTH=width,
        WIDTH_PAD=next_power_of_2(width),
        ROWS=rows,
        num_warps=4,
        **early,
    )
    group, top_k = num_experts // num_groups, ids.shape[1]
    launch_kernel(
        choose_experts_kernel,
        (tokens,),
        *(logits, bias, Matrix.of(ids), Matrix.of(weights), norm_eps or 0.0, scale),
        NUM_GROUPS=num_groups,
        GROUP=group,
        GROUPS_PAD=next_power_of_2(num_groups),
        GROUP_PAD=next_power_of_2(group),
        TOP_GROUPS=top_groups,
        GROUP_BEST=group_best,
        TOP_K=top_k,
        TOP_K_PAD=next_power_of_2(top_k),
        SIGMOID=scoring == "sigmoid",
        NORMS=norm_eps is not None,
        num_warps=1,
        **early,
    )
