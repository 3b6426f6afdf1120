"""Keys and values into the pools: `write_kv`, and with norm and rotation `rope_write_kv`."""

from typing import Any

from torch import Tensor

from torchpaged.backends.choose.for_call import choose_ops
from torchpaged.backends.choose.kind import Kind
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.cache_write.call import RotatedWriteCall, WriteCall
from torchpaged.custom_ops.cache_write.check import check_rope_write_kv, check_write_kv
from torchpaged.custom_ops.checks import check_tensors, given, refuse_grad
from torchpaged.functional.arguments import run_op


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    are_query_tokens: bool = False,
    ops: BackendOps | None = None,
) -> None:
    """Store this step's keys and values in the pools, in place.

    >>> k_cache, v_cache = torch.zeros(2, 4, 4, 1, 8)
    >>> write_kv(torch.ones(2, 1, 8), torch.ones(2, 1, 8), k_cache, v_cache, torch.tensor([6, -1]))
    >>> k_cache.sum((2, 3)).tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 8.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]

    Args:
        k: ``[num_tokens, num_kv_heads, head_dim]``, the pools' dtype (or a float dtype for fp8 pools).
        v: ``[num_tokens, num_kv_heads, head_dim_v]``.
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``; any strides with a contiguous
            last dimension.
        v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim_v]``.
        slot_mapping: ``[num_tokens]`` int64, ``block * block_size + offset``; -1 skips the token.
        k_scale, v_scale: float32 ``[1]`` or ``[num_kv_heads]``, for fp8 pools: what is stored is
            ``x / scale``.
        are_query_tokens: promises that the next `paged_attention` over these pools has exactly these tokens
            as its query tokens, and that none of them is context of a request in it. It may then start while
            this write runs, which saves a microsecond or two on Hopper. It promises, too, that the kernel
            right in front does not write ``slot_mapping``, which is read before that kernel has ended.
            Without the promise any call may follow.
        ops: whose kernels to run; default: those of the backend that every other entry point would choose.

    Raises:
        ArgumentError: shapes, dtypes, devices, strides or slots don't fit; nothing is written then.
        BackendUnavailableError: the backend that was asked for can't serve this; with all reasons.
    """
    check_tensors(
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
        **given(k_scale=k_scale, v_scale=v_scale),
    )
    refuse_grad(k=k, v=v)
    args = (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    run_op(
        "write_kv",
        lambda: check_write_kv(WriteCall.of(*args)),
        args,
        {},
        lambda: choose_ops(Kind.written(k, v, k_cache), planned=True) if ops is None else ops,
        native="k",  # pools are of this dtype, or of fp8
        are_query_tokens=are_query_tokens,
    )


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    are_query_tokens: bool = False,
    ops: BackendOps | None = None,
) -> Tensor:
    """RMSNorm of each head of q and k (optional), rotary embedding, and `write_kv` of this step's keys and
    values, in one pass.

    Norm: ``x * rsqrt(mean(x^2) + norm_eps) * (norm_offset + weight)`` (arXiv:1910.07467; Qwen3 with offset 0,
    Gemma with 1).

    Rotation (arXiv:2104.09864): ``(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)`` over the first
    ``rotary_dim`` of each head. Both run in float32 and the result is rounded once, to q's dtype or the
    pools'. HuggingFace rounds more often: Qwen3's norm before and after its weight, Gemma's once, and the
    rotation in the model's dtype after each product. In 16-bit dtypes the results thus differ from
    HuggingFace's by a few units in the last place, and are the closer ones to the exact values.

    Args:
        q: ``[num_tokens, num_heads, head_dim]``; any strides with a contiguous last dimension, e.g. a slice
            of a fused qkv.
        k: ``[num_tokens, num_kv_heads, head_dim]``, q's dtype, strides likewise.
        v: ``[num_tokens, num_kv_heads, head_dim_v]``, likewise.
        positions: ``[num_tokens]`` int64 in ``[0, max_position)``, those of padding rows included.
        cos_sin: ``[max_position, rotary_dim]``, float32 or q's dtype: ``rotary_dim // 2`` cosines, then as
            many sines.
        k_cache, v_cache, slot_mapping: as in `write_kv`; slot -1 skips the write, and the query is
            still returned.
        q_norm, k_norm: ``[head_dim]`` weights in q's dtype or float32; None = no norm.
        norm_eps: added to the mean of squares.
        norm_offset: added to the weights.
        interleaved: the pairs that turn together are ``(2i, 2i + 1)`` (GPT-J) instead of
            ``(i, i + rotary_dim // 2)`` (NeoX, Llama).
        k_scale, v_scale: float32 ``[1]`` or ``[num_kv_heads]``, for fp8 pools: what is stored is
            ``x / scale``, saturated.
        are_query_tokens: as in `write_kv`; the kernel right in front does not write ``positions``,
            ``cos_sin`` or a norm weight either.
        ops: whose kernels to run; default: as the module docstring says.

    Returns:
        The rotated queries, ``[num_tokens, num_heads, head_dim]`` in q's dtype, contiguous.

    Raises:
        ArgumentError: shapes, dtypes, devices, strides, positions or slots don't fit; nothing is
            written then.
        BackendUnavailableError: the backend that was asked for can't serve this; with all reasons.
    """
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "positions": positions,
        "cos_sin": cos_sin,
        "slot_mapping": slot_mapping,
        "k_cache": k_cache,
        "v_cache": v_cache,
    }
    optional = given(q_norm=q_norm, k_norm=k_norm, k_scale=k_scale, v_scale=v_scale)
    check_tensors(**tensors, **optional)
    q_out = q.new_empty(q.shape)
    refuse_grad(q=q, k=k, v=v, q_norm=q_norm, k_norm=k_norm)
    args = (q, k, v, positions, cos_sin, slot_mapping, q_out, k_cache, v_cache)
    options: dict[str, Any] = {**optional, "norm_eps": norm_eps, "norm_offset": norm_offset}
    run_op(
        "rope_write_kv",
        lambda: check_rope_write_kv(RotatedWriteCall.of(*args, **options)),
        args,
        options,
        lambda: choose_ops(Kind.written(k, v, k_cache), planned=True) if ops is None else ops,
        native="k",  # pools are of this dtype, or of fp8
        interleaved=interleaved,
        are_query_tokens=are_query_tokens,
    )
    return q_out
