"""Attention over two sets of keys, put together: `merge_attn_states`."""

from functools import partial

import torch
from torch import Tensor

from torchpaged.backends.choose.for_call import device_ops
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.attention.cascade_call import MergeCall
from torchpaged.custom_ops.attention.check import check_merge_attn_states
from torchpaged.custom_ops.checks import check_tensors, given, refuse_grad
from torchpaged.functional.arguments import run_op


def merge_attn_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    output_scale: Tensor | None = None,
    ops: BackendOps | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys (arXiv:2501.01005, section 2.2).

    >>> out, lse = torch.ones(1, 2, 4), torch.zeros(1, 2)
    >>> merge_attn_states(out, lse, 3 * out, lse)[0][0, 0].tolist()
    [2.0, 2.0, 2.0, 2.0]

    Args:
        out_a, out_b: ``[num_tokens, num_heads, head_dim_v]``.
        lse_a, lse_b: ``[num_tokens, num_heads]`` float32, natural logarithm; -inf = that side saw no key and
            its ``out`` is not read. NaN or +inf on either side makes the row NaN: an LSE of +inf, with which
            some libraries mark empty rows, is none to us.
        output_scale: float32, one number; the first result is then of float8_e4m3fn, as in
            `torchpaged.paged_attention`.
        ops: whose kernels to run; default: those of the backend that every other entry point would choose.

    Returns:
        ``(out, lse)`` of attention over both sets.

    Raises:
        ArgumentError: shapes, dtypes or devices don't fit.
        BackendUnavailableError: the backend that was asked for is not usable here; with all reasons.
    """
    read = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    read |= given(output_scale=output_scale)
    check_tensors(**read)
    dtype = out_a.dtype if output_scale is None else torch.float8_e4m3fn
    out, lse = torch.empty_like(out_a, dtype=dtype), torch.empty_like(lse_a)
    refuse_grad(**read)
    call = MergeCall(out_a, lse_a, out_b, lse_b, out, lse, output_scale)
    run_op(
        "merge_attn_states",
        partial(check_merge_attn_states, call),
        *call.flat(),
        lambda: device_ops(out_a.device) if ops is None else ops,
        native="out_a",
    )
    return out, lse
