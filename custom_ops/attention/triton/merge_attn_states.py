"""merge_attn_states: one program merges one token's row of one head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.attention.check import check_merge_attn_states
from torchpaged.custom_ops.triton.launching import next_power_of_2, require_launchable


@triton.jit
def merge_attn_states_kernel(
    a_ptr,
    lse_a_ptr,
    b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    a_token,
    a_head,
    la_token,
    la_head,
    b_token,
    b_head,
    lb_token,
    lb_head,
    o_token,
    o_head,
    l_token,
    l_head,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Grid: (num_tokens, num_heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    lse_a = tl.load(lse_a_ptr + token * la_token + head * la_head)
    lse_b = tl.load(lse_b_ptr + token * lb_token + head * lb_head)
    # A NaN or +inf lives on in its own weight, whatever the maximum makes of it; a side that saw nothing is
    # left out.
    top = tl.maximum(lse_a, lse_b)
    sees_a, sees_b = lse_a != float("-inf"), lse_b != float("-inf")
    sees = sees_a | sees_b
    safe = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(lse_a - safe), tl.exp(lse_b - safe)
    total = tl.where(sees, weight_a + weight_b, 1.0)
    d = tl.arange(0, DIM_PAD)
    a = tl.load(a_ptr + token * a_token + head * a_head + d, mask=d < DIM, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token * b_token + head * b_head + d, mask=d < DIM, other=0.0).to(tl.float32)
    out = tl.where(sees_a, a * (weight_a / total), 0.0) + tl.where(sees_b, b * (weight_b / total), 0.0)
    tl.store(out_ptr + token * o_token + head * o_head + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM)
    if lse_ptr is not None:
        tl.store(
            lse_ptr + token * l_token + head * l_head, tl.where(sees, safe + tl.log(total), float("-inf"))
        )


def merge_attn_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor | None = None
) -> None:
    """Launch; arguments as in ``custom_ops/attention/schema.py``."""
    require_launchable(out_a)
    check_merge_attn_states(out_a, lse_a, out_b, lse_b, out, lse)
    num_tokens, num_heads, dim = out.shape
    if not num_tokens:
        return
    merge_attn_states_kernel[(num_tokens, num_heads)](
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        *out_a.stride()[:2],
        *lse_a.stride(),
        *out_b.stride()[:2],
        *lse_b.stride(),
        *out.stride()[:2],
        *(lse.stride() if lse is not None else (0, 0)),
        DIM=dim,
        DIM_PAD=next_power_of_2(dim),
        num_warps=1,
    )
