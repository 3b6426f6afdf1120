"""FlashAttention's call for packed queries, as vLLM's build of it has it, on the kernels of torchpaged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchpaged.compat.arguments import (
    by_their_names,
    check_out,
    check_zero,
    is_eager,
    note_hints,
    refuse,
    scale_of,
    slopes_of,
    window_of,
)
from torchpaged.compat.call import PackedCall
from torchpaged.compat.dense import packed_pools
from torchpaged.custom_ops.batch_values import check_starts
from torchpaged.custom_ops.checks import check_dims, check_dtype, check_tensors, is_int, reads_values
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.pools import FP8

_NAMES = {
    "k_cache": "k",
    "v_cache": "v",
    "query_start_loc": "cu_seqlens_q",
    "seq_lens": "seqused_k",
    "max_query_len": "max_seqlen_q",
    "logits_soft_cap": "softcap",
    "scale": "softmax_scale",
    "sinks": "s_aux",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | list[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    fa_version: int | None = None,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
) -> Any:
    """Attention of packed queries over paged or packed keys and values. Inference only.

    Causal alignment is bottom-right: query ``i`` of a request with S queries and L keys stands at position
    ``L - S + i``. A query that sees no key gives zeros and LSE -inf, as do tokens of ``q`` behind
    ``cu_seqlens_q[-1]``. (Some builds of FlashAttention give LSE +inf there.) The window is
    ``[position - left, position + right]``, both ends seen; -1 is open. Causal closes the right side whatever
    the window says.

    Args:
        q: ``[total_q, num_heads, head_dim]``; float8_e4m3fn is computed and returned in bfloat16.
        k: ``[num_blocks, block_size, num_kv_heads, head_dim]`` with a ``block_table``, else
            ``[total_k, num_kv_heads, head_dim]``.
        v: as ``k``; its last dimension, head_dim_v, may differ.
        max_seqlen_q: host int, an upper bound of the queries of a request; 1 chooses the decode kernels.
        cu_seqlens_q: ``[num_reqs + 1]`` int32.
        max_seqlen_k: host int, an upper bound of the keys of a request. With a block table the kernels read
            the lengths on the device, and only a CPU, where values are checked, looks at it.
        cu_seqlens_k: ``[num_reqs + 1]`` int32, where each request's keys lie in packed ``k``; with a block
            table, as upstream calls it, their differences are the keys of each request.
        seqused_k: ``[num_reqs]`` int32, keys of each request; with a block table, instead of
            ``cu_seqlens_k``.
        q_v: refused.
        dropout_p: must be 0.
        softmax_scale: default ``head_dim ** -0.5``.
        causal, window_size, softcap: as above; softcap 0 is off.
        alibi_slopes: float32 ``[num_heads]``, or ``[num_reqs, num_heads]`` with equal rows (one, or
            expanded). Refused unless causal.
        deterministic: accepted: the forward pass always is.
        return_attn_probs: refused; ``return_softmax_lse`` returns the LSE.
        block_table: ``[num_reqs, max_blocks_per_req]`` int32. Block 0 is a block like any other.
        return_softmax_lse: also return the LSE.
        out: ``[total_q, num_heads, head_dim_v]`` to write into, which is returned.
        q_descale, k_descale, v_descale: float32 of one number or ``[num_reqs, num_kv_heads]``; those of keys
            and values with fp8 ``k`` and ``v`` only, that of queries with fp8 ``q`` only. Ones that differ
            between requests cost one more rounding of ``q`` or ``out``.
        scheduler_metadata, num_splits, fa_version: tune the original and change no result; they change
            nothing here. ``num_splits=1``, which asks for results that do not depend on the batch's other
            requests, is refused.
        s_aux: ``[num_heads]``, one logit per head that takes part in the softmax without a value.
        cp_world_size, cp_rank, cp_tot_seqused_k: refused unless 1, 0 and None.

    Returns:
        ``[total_q, num_heads, head_dim_v]``; with ``return_softmax_lse`` a pair of it and float32
        ``[num_heads, total_q]``, natural logarithm.

    Raises:
        ArgumentError: an argument does not fit or is not honoured. In a traced call dynamo's own error.
        BackendUnavailableError: the backend that was asked for can't serve the call.
    """
    name = "flash_attn_varlen_func"
    if isinstance(max_seqlen_q, Tensor):
        raise ArgumentError(
            "max_seqlen_q",
            "an int, as in vLLM's order: max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k",
            "a tensor, as in flash_attn's own order: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k",
            "pass them by name: both orders have the same names",
        )
    refuse(name, q_v=q_v, cp_tot_seqused_k=cp_tot_seqused_k)
    refuse(
        name,
        "pass return_softmax_lse=True for the LSE",
        return_attn_probs=True if return_attn_probs else None,
    )
    check_zero(name, dropout_p=dropout_p, cp_rank=cp_rank, cp_world_size=cp_world_size - 1)
    refuse_invariant_splits(num_splits)
    note_hints(name, scheduler_metadata=scheduler_metadata, num_splits=num_splits or None)
    if is_eager():
        _check(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, seqused_k, block_table)
        if fa_version not in (None, 2, 3, 4):
            raise ArgumentError("fa_version", "2, 3, 4 or None", repr(fa_version))
    num_reqs = cu_seqlens_q.shape[0] - 1
    if block_table is None:
        if cu_seqlens_k is None:
            expected = "where each request's keys lie, since k is packed"
            raise ArgumentError("cu_seqlens_k", expected, "None", "or pass block_table and seqused_k")
        lens = cu_seqlens_k.diff()
        k_cache, v_cache, table = packed_pools(k, v, cu_seqlens_k[:-1], max_seqlen_k)
    else:
        if seqused_k is not None:
            lens = seqused_k
        elif cu_seqlens_k is not None:
            lens = cu_seqlens_k.diff()
        else:
            raise ArgumentError("seqused_k", "the keys of each request, together with a block_table", "None")
        k_cache, v_cache, table = k, v, block_table
    is_causal, window = window_of(causal, window_size)
    options = {
        "scale": softmax_scale,
        "causal": is_causal,
        "window_size": window,
        "logits_soft_cap": softcap,
        "alibi_slopes": slopes_of(alibi_slopes, num_reqs, is_causal),
        "sinks": s_aux,
    }
    call = packed_call(
        q,
        k_cache,
        v_cache,
        table,
        lens,
        cu_seqlens_q,
        max_seqlen_q,
        options,
        (q_descale, k_descale, v_descale),
        same_lens=cu_seqlens_k is cu_seqlens_q and seqused_k is None,
    )
    if out is not None and is_eager():
        check_out(out, q, v.shape[-1], torch.bfloat16 if q.dtype in FP8 else q.dtype)
    result, lse = by_their_names(_NAMES, lambda: call.run(out, return_softmax_lse))
    return result if lse is None else (result, lse.transpose(0, 1).contiguous())


def packed_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    options: dict[str, Any],
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
    *,
    same_lens: bool = False,
) -> PackedCall:
    """A `PackedCall` whose descales of queries, keys and values are with the kernels where these take them.

    Raises:
        ArgumentError: a descale that does not fit, or one of queries that are not fp8.
    """
    num_reqs, num_kv_heads = seq_lens.shape[0], k_cache.shape[2]
    q_scale, q_each = scale_of("q_descale", descales[0], num_reqs, num_kv_heads, q)
    k_scale, k_each = scale_of("k_descale", descales[1], num_reqs, num_kv_heads, k_cache)
    v_scale, v_each = scale_of("v_descale", descales[2], num_reqs, num_kv_heads, v_cache)
    if q_scale is not None:  # the kernels have no scale of queries
        q_each = q_scale.expand(num_reqs, num_kv_heads)
    longest = max(max_query_len, 1) if type(max_query_len) is int else max_query_len
    return PackedCall(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        longest,
        {**options, "k_scale": k_scale, "v_scale": v_scale},
        q_each,
        k_each,
        v_each,
        same_lens,
    )


def refuse_invariant_splits(num_splits: int | None) -> None:
    """Raise for ``num_splits=1``: with it FlashAttention promises the same bits for a request in every batch,
    and we don't yet."""
    if type(num_splits) is int and num_splits == 1:
        raise ArgumentError(
            "num_splits",
            "0 or None (results that do not depend on the batch's other requests are not promised)",
            "1",
        )


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """What only this door asks; the rest is checked with the op's arguments."""
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    check_dims("q", q, None, None, None)
    check_dims("cu_seqlens_q", cu_seqlens_q, None)
    for name, size in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not is_int(size) or size < 0:
            raise ArgumentError(name, "an int, an upper bound of the lengths", repr(size))
    num_reqs = cu_seqlens_q.shape[0] - 1
    given = {"cu_seqlens_k": (cu_seqlens_k, num_reqs + 1), "seqused_k": (seqused_k, num_reqs)}
    for name, (lens, size) in given.items():
        if lens is not None:
            check_tensors(**{name: lens})
            check_dims(name, lens, size)
            check_dtype(name, lens, torch.int32)
    if block_table is None:
        check_dims("k", k, None, None, None)
        check_dims("v", v, k.shape[0], k.shape[1], None)
    else:
        check_tensors(block_table=block_table)
    if cu_seqlens_k is not None and reads_values(q.device):
        check_starts("cu_seqlens_k", cu_seqlens_k, k.shape[0] if block_table is None else 2**31)
    if cu_seqlens_k is not None and seqused_k is not None:
        raise ArgumentError("cu_seqlens_k", "None together with seqused_k", "both")
    lens = seqused_k if seqused_k is not None else cu_seqlens_k.diff() if cu_seqlens_k is not None else None
    if lens is not None and lens.numel() and reads_values(q.device) and int(lens.max()) > max_seqlen_k:
        raise ArgumentError(
            "max_seqlen_k", f"at least the longest request's keys ({int(lens.max())})", str(max_seqlen_k)
        )
