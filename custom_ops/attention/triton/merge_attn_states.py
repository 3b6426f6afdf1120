"""merge_attn_states: one program merges one token's row of one head."""

import triton
import triton.language as tl

from torchpaged.custom_ops.attention.cascade_call import MergeCall
from torchpaged.custom_ops.attention.check import check_merge_attn_states
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import next_power_of_2, require_fp8, require_launchable
from torchpaged.custom_ops.triton.records import Results
from torchpaged.custom_ops.triton.results import stored


@triton.jit
def merge_attn_states_kernel(a, b, results, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Arguments: `Results`. Grid: (num_tokens, num_heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    lse_a = tl.load(a.lse + token * a.l_token + head * a.l_head)
    lse_b = tl.load(b.lse + token * b.l_token + head * b.l_head)
    # A NaN or +inf lives on in its own weight, whatever the maximum makes of it; a side that saw nothing is
    # left out.
    top = tl.maximum(lse_a, lse_b)
    sees_a, sees_b = lse_a != float("-inf"), lse_b != float("-inf")
    sees = sees_a | sees_b
    safe = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(lse_a - safe), tl.exp(lse_b - safe)
    total = tl.where(sees, weight_a + weight_b, 1.0)
    d = tl.arange(0, DIM_PAD)
    x_a = tl.load(a.out + token * a.o_token + head * a.o_head + d, mask=d < DIM, other=0.0).to(tl.float32)
    x_b = tl.load(b.out + token * b.o_token + head * b.o_head + d, mask=d < DIM, other=0.0).to(tl.float32)
    out = tl.where(sees_a, x_a * (weight_a / total), 0.0) + tl.where(sees_b, x_b * (weight_b / total), 0.0)
    target = results.out + token * results.o_token + head * results.o_head + d
    tl.store(target, stored(results, out), mask=d < DIM)
    if results.lse is not None:
        lse = tl.where(sees, safe + tl.log(total), float("-inf"))
        tl.store(results.lse + token * results.l_token + head * results.l_head, lse)


def merge_attn_states(call: MergeCall) -> None:
    """Launch; arguments as in ``custom_ops/attention/schema.py``."""
    require_launchable(call.out_a)
    require_fp8(call.out, "output")
    check_merge_attn_states(call)
    num_tokens, num_heads, dim = call.out.shape
    if not num_tokens:
        return
    launch_kernel(
        merge_attn_states_kernel,
        (num_tokens, num_heads),
        *(Results.of_tensors(*state) for state in call.states),
        Results.of(call),
        DIM=dim,
        DIM_PAD=next_power_of_2(dim),
        num_warps=1,
    )
