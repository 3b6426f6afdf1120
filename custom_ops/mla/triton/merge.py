"""The parts that `mla_kernel` left of one row, put together."""

import triton
import triton.language as tl

from torchpaged.custom_ops.triton.results import stored


@triton.jit(do_not_specialize=["num_reqs", "num_parts"])
def merge_kernel(
    num_reqs,
    num_parts,
    starts_ptr,
    results,
    parts,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    MAX_PARTS: tl.constexpr,
):
    """Arguments: `MergeArguments`. Grid: (num_tokens x NUM_HEADS,). A row of no request, or without keys in
    any part: zeros and -inf."""
    LN2: tl.constexpr = 0.6931471805599453
    token, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    inside = token < tl.load(starts_ptr + num_reqs)
    token, head = token.to(tl.int64), head.to(tl.int64)
    part, d = tl.arange(0, MAX_PARTS), tl.arange(0, RANK_PAD)
    at = (token * NUM_HEADS + head) * num_parts
    # bounds rather than flags: the interpreter takes no mask made of a number and a tensor
    written = tl.where(inside, num_parts, 0)
    maxima = tl.load(parts.state + (at + part) * 2, mask=part < written, other=-2.0e30)
    totals = tl.load(parts.state + (at + part) * 2 + 1, mask=part < written, other=0.0)
    top = tl.max(maxima, 0)
    sees = tl.where(top < -1.5e30, 0, 1) > 0  # a NaN was seen
    weights = tl.where(maxima < -1.5e30, 0.0, tl.exp2(maxima - top))
    total = tl.sum(totals * weights, 0)
    acc = tl.zeros([RANK_PAD], tl.float32)
    for i in range(written):
        maximum = tl.load(parts.state + (at + i) * 2)
        columns = tl.where(maximum < -1.5e30, 0, RANK)
        weight = tl.where(columns > 0, tl.exp2(maximum - top), 0.0)
        acc += weight * tl.load(parts.acc + (at + i) * RANK + d, mask=d < columns, other=0.0)
    divisor = tl.where(sees, total, 1.0)
    out = tl.where(sees, acc / divisor, 0.0)
    out_at = results.out + token * results.o_token + head * results.o_head + d
    tl.store(out_at, stored(results, out), mask=d < RANK)
    if results.lse is not None:
        lse = tl.where(sees, top * LN2 + tl.log(divisor), float("-inf"))
        tl.store(results.lse + token * results.l_token + head * results.l_head, lse)
