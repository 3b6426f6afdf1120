"""torch's ``torch.nn.attention.varlen`` (torch 2.12 and newer), on the kernels of torchpaged, with any
torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchpaged.compat.arguments import by_their_names, check_out, is_eager, window_of
from torchpaged.compat.call import PackedCall
from torchpaged.compat.dense import packed_pools
from torchpaged.compat.flash_attn import packed_call, refuse_invariant_splits
from torchpaged.custom_ops.batch_values import check_starts
from torchpaged.custom_ops.checks import check_dims, check_dtype, check_tensors, is_int, reads_values
from torchpaged.custom_ops.errors import ArgumentError

_NAMES = {
    "q": "query",
    "k_cache": "key",
    "v_cache": "value",
    "query_start_loc": "cu_seq_q",
    "seq_lens": "seqused_k",
    "max_query_len": "max_q",
    "max_seqlen_k": "max_k",
}


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> Any:
    """`torch.nn.attention.varlen.varlen_attn`. Inference only; float32 and a CPU are served too, and so is a
    trace with any lengths.

    Args:
        query: ``[total_q, num_heads, head_dim]``.
        key: ``[total_k, num_kv_heads, head_dim]``, or ``[num_blocks, block_size, num_kv_heads, head_dim]``
            with a ``block_table``.
        value: as ``key``; its last dimension, head_dim_v, may differ.
        cu_seq_q: ``[num_reqs + 1]`` int32.
        cu_seq_k: ``[num_reqs + 1]`` int32; None with a block table.
        max_q, max_k: host ints, upper bounds. With a block table the kernels read the keys' lengths on the
            device, and not ``max_k``.
        return_aux: anything with a true ``lse``, such as torch's ``AuxRequest(lse=True)``: also return the
            LSE.
        scale: softmax scale; default ``head_dim ** -0.5``.
        window_size: ``(left, right)``: (-1, -1) is full attention, (-1, 0) causal, (W, 0) causal with a
            window of W keys before the own one. Alignment is bottom-right.
        enable_gqa: must be True where there are fewer key heads than query heads.
        seqused_k: ``[num_reqs]`` int32, keys of each request that count. Needed with a block table.
        block_table: ``[num_reqs, max_blocks_per_req]`` int32. Block 0 is a block like any other.
        num_splits: None. 1, with which torch promises results that do not depend on the batch's other
            requests, is refused.
        out: ``[total_q, num_heads, head_dim_v]`` to write into, which is returned; torch has it in
            `varlen_attn_out`.

    Returns:
        ``[total_q, num_heads, head_dim_v]``; with ``return_aux.lse`` a pair of it and float32
        ``[num_heads, total_q]``, natural logarithm.

    Raises:
        ArgumentError: an argument does not fit or is not honoured. In a traced call dynamo's own error.
    """
    refuse_invariant_splits(num_splits)
    if is_eager():
        _check(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, enable_gqa, seqused_k, block_table)
        if out is not None:
            check_out(out, query, value.shape[-1], query.dtype)
    call = _call(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, seqused_k, block_table
    )
    wants_lse = bool(return_aux is not None and return_aux.lse)
    result, lse = by_their_names(_NAMES, lambda: call.run(out, wants_lse))
    return result if lse is None else (result, lse.transpose(0, 1).contiguous())


def varlen_attn_out(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    **options: Any,
) -> Any:
    """`torch.nn.attention.varlen.varlen_attn_out`: `varlen_attn` into ``out``, of its arguments."""
    return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, out=out, **options)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float | None,
    window_size: tuple[int, int],
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> PackedCall:
    if block_table is None:
        if cu_seq_k is None:
            expected = "where each request's keys lie, since key is packed"
            raise ArgumentError("cu_seq_k", expected, "None", "or pass block_table and seqused_k")
        lens = cu_seq_k.diff() if seqused_k is None else seqused_k
        key, value, block_table = packed_pools(key, value, cu_seq_k[:-1], max_k)
    else:
        if seqused_k is None:
            raise ArgumentError("seqused_k", "the keys of each request, together with a block_table", "None")
        lens = seqused_k
    causal, window = window_of(False, window_size)
    options = {"scale": scale, "causal": causal, "window_size": window}
    return packed_call(
        query,
        key,
        value,
        block_table,
        lens,
        cu_seq_q,
        max_q,
        options,
        (None, None, None),
        same_lens=cu_seq_k is cu_seq_q and seqused_k is None,
    )


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    enable_gqa: bool,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> None:
    check_tensors(query=query, key=key, value=value, cu_seq_q=cu_seq_q)
    check_dims("query", query, None, None, None)
    check_dims("cu_seq_q", cu_seq_q, None)
    for name, size in (("max_q", max_q), ("max_k", max_k)):
        if not is_int(size) or size < 0:
            raise ArgumentError(name, "an int, an upper bound of the lengths", repr(size))
    num_reqs = cu_seq_q.shape[0] - 1
    for name, lens, size in (("cu_seq_k", cu_seq_k, num_reqs + 1), ("seqused_k", seqused_k, num_reqs)):
        if lens is not None:
            check_tensors(**{name: lens})
            check_dims(name, lens, size)
            check_dtype(name, lens, torch.int32)
    if block_table is None:
        check_dims("key", key, None, None, None)
        if cu_seq_k is not None and reads_values(query.device):
            check_starts("cu_seq_k", cu_seq_k, key.shape[0])
            counts = cu_seq_k.diff()
            if seqused_k is not None and bool(((seqused_k < 0) | (seqused_k > counts)).any()):
                raise ArgumentError(
                    "seqused_k",
                    f"at most each request's keys, {counts.tolist()[:64]}",
                    str(seqused_k.tolist()[:64]),
                )
    else:
        check_dims("key", key, None, None, None, None)
        if cu_seq_k is not None:
            raise ArgumentError("cu_seq_k", "None together with block_table", "a tensor")
    if not enable_gqa and query.shape[1] != key.shape[-2]:
        raise ArgumentError(
            "enable_gqa", f"True for {query.shape[1]} query heads and {key.shape[-2]} key heads", "False"
        )
