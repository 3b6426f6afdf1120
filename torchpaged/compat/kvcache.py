"""FlashAttention's call over a KV cache (the signature of version 3), on the kernels of torchpaged."""

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
    slopes_of,
    window_of,
)
from torchpaged.compat.dense import rows_as_pools
from torchpaged.compat.flash_attn import packed_call, refuse_invariant_splits
from torchpaged.compat.kvcache_check import check_kvcache
from torchpaged.compat.rotary import check_rotary
from torchpaged.compat.tokens import rotated, slots_of, tokens_of
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.pools import FP8
from torchpaged.functional import write_kv

_NAMES = {
    "block_table": "page_table",
    "query_start_loc": "cu_seqlens_q",
    "seq_lens": "cache_seqlens",
    "max_query_len": "max_seqlen_q",
    "logits_soft_cap": "softcap",
    "scale": "softmax_scale",
    "chunk_size": "attention_chunk",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
    "slot_mapping": "cache_seqlens",
}


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | list[int] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """Store new keys and values in the cache (optional), then attend over it. Inference only.

    Alignment, windows and empty rows are those of `flash_attn_varlen_func`; the keys of a request are the
    cached and the new ones.

    Args:
        q: ``[num_reqs, seqlen_q, num_heads, head_dim]``, or ``[total_q, num_heads, head_dim]`` with
            ``cu_seqlens_q``.
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]`` with a ``page_table``, else a row per
            request: ``[batch_size_cache, seqlen_cache, num_kv_heads, head_dim]``.
        v_cache: as ``k_cache``; its last dimension, head_dim_v, may differ.
        k, v: ``[num_reqs, seqlen_new, num_kv_heads, head_dim(_v)]``, or with ``cu_seqlens_k_new``
            ``[total_new, num_kv_heads, head_dim(_v)]``: stored behind the first ``cache_seqlens`` tokens of
            each request, in place, before anything is attended.
        qv: refused.
        rotary_cos, rotary_sin: ``[max_position, rotary_dim // 2]``, with ``k`` only: new keys are turned by
            the positions at which they are stored, queries by those of the new keys (all by the first, where
            attention is neither causal nor windowed).
        cache_seqlens: an int or ``[num_reqs]`` int32, tokens of each request in the cache, new ones not
            counted. None: the cache is full.
        cache_batch_idx: ``[num_reqs]`` int32, the row of each request; only without a page table.
        cache_leftpad: refused.
        page_table: ``[num_reqs, max_blocks_per_req]`` int32; block 0 is a block like any other.
        cu_seqlens_q, cu_seqlens_k_new: ``[num_reqs + 1]`` int32.
        max_seqlen_q: host int, needed with ``cu_seqlens_q``.
        rotary_seqlens: ``[num_reqs]`` int32, the position of each request's first new token, in place of
            ``cache_seqlens``.
        q_descale, k_descale, v_descale: as in `flash_attn_varlen_func`. New keys and values are divided by
            theirs when they are stored; ones that differ between requests are refused then.
        softmax_scale, causal, window_size, softcap, scheduler_metadata, num_splits: as in
            `flash_attn_varlen_func`.
        attention_chunk: a query sees the keys of its own chunk of so many positions; 0 is off. Refused unless
            causal.
        rotary_interleaved: the pairs are columns ``(2i, 2i + 1)`` instead of ``(i, i + rotary_dim // 2)``.
        pack_gqa, sm_margin: tune the original and change no result; they change nothing here.
        return_softmax_lse: also return the LSE.
        sinks, s_aux: ``[num_heads]``, one logit per head that takes part in the softmax without a value; two
            names of one thing.
        alibi_slopes: as in `flash_attn_varlen_func`.
        block_table: another name of ``page_table``.
        out: a tensor of the result's shape to write into, which is returned.

    Returns:
        The attention, of q's shape with head_dim_v columns; with ``return_softmax_lse`` a pair of it and
        float32 ``[num_reqs, num_heads, seqlen_q]``, or ``[num_heads, total_q]`` with ``cu_seqlens_q``.

    Raises:
        ArgumentError: an argument does not fit or is not honoured; nothing is written then. In a traced call
            dynamo's own error.
        BackendUnavailableError: the backend that was asked for can't serve the call.
    """
    name = "flash_attn_with_kvcache"
    refuse(name, qv=qv, cache_leftpad=cache_leftpad)
    refuse_invariant_splits(num_splits)
    note_hints(
        name,
        scheduler_metadata=scheduler_metadata,
        num_splits=num_splits or None,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin or None,
    )
    table = _one_of("page_table", page_table, "block_table", block_table)
    sink_logits = _one_of("sinks", sinks, "s_aux", s_aux)
    is_causal, window = window_of(causal, window_size)
    if not is_causal:
        check_zero(name, attention_chunk=attention_chunk)
    if is_eager():
        check_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos,
            rotary_sin,
            cache_seqlens,
            cache_batch_idx,
            table,
            cu_seqlens_q,
            cu_seqlens_k_new,
            max_seqlen_q,
            rotary_seqlens,
        )
    queries = tokens_of(q, cu_seqlens_q)
    num_reqs = queries.counts.shape[0]
    pools = (k_cache, v_cache)
    if table is None:
        k_pool, v_pool, table = rows_as_pools(k_cache, v_cache, cache_batch_idx, num_reqs)
    else:
        k_pool, v_pool = pools
    lens = _cached(cache_seqlens, num_reqs, table.shape[1] * k_pool.shape[1], q.device)
    options = {
        "scale": softmax_scale,
        "causal": is_causal,
        "window_size": window,
        "logits_soft_cap": softcap,
        "sinks": sink_logits,
        "alibi_slopes": slopes_of(alibi_slopes, num_reqs, is_causal),
        "chunk_size": attention_chunk,
    }
    packed, seq_lens = queries.x, lens
    new = None
    if k is not None and v is not None:
        new = tokens_of(k, cu_seqlens_k_new), tokens_of(v, cu_seqlens_k_new)
        seq_lens = lens + new[0].counts
        if rotary_cos is not None and rotary_sin is not None:
            first = lens if rotary_seqlens is None else rotary_seqlens
            all_first = not is_causal and window == (-1, -1)
            if is_eager():
                last = first.long() + torch.maximum(new[0].counts, queries.counts) - 1
                check_rotary(new[0].x, rotary_cos, rotary_sin, last)
            packed = rotated(queries, rotary_cos, rotary_sin, first, rotary_interleaved, all_first)
            new = (
                new[0]._replace(x=rotated(new[0], rotary_cos, rotary_sin, first, rotary_interleaved, False)),
                new[1],
            )
    longest = (q.shape[1] if cu_seqlens_q is None else max_seqlen_q) or 1
    call = packed_call(
        packed,
        k_pool,
        v_pool,
        table,
        seq_lens,
        queries.starts,
        longest,
        options,
        (q_descale, k_descale, v_descale),
    )
    flat_out = None
    if out is not None:
        if is_eager():
            check_out(out, q, v_cache.shape[-1], torch.bfloat16 if q.dtype in FP8 else q.dtype)
        flat_out = out if cu_seqlens_q is not None else out.view(-1, *out.shape[2:])
    if new is not None:
        if call.k_descale is not None or call.v_descale is not None:
            raise ArgumentError(
                "k_descale",
                "the same for all requests, since new keys are stored",
                "descales of each request",
            )
        if is_eager():
            by_their_names(_NAMES, lambda: call.check(flat_out, return_softmax_lse))
        slots = slots_of(new[0], lens, table, k_pool.shape[1])
        scales = (call.options["k_scale"], call.options["v_scale"])
        by_their_names(_NAMES, lambda: write_kv(new[0].x, new[1].x, *pools, slots, *scales))
    result, lse = by_their_names(_NAMES, lambda: call.run(flat_out, return_softmax_lse))
    if cu_seqlens_q is None:
        result = result.view(*q.shape[:3], result.shape[-1])
    if lse is None:
        return result
    if cu_seqlens_q is None:
        return result, lse.view(num_reqs, q.shape[1], -1).transpose(1, 2).contiguous()
    return result, lse.transpose(0, 1).contiguous()


def _one_of(name: str, value: Tensor | None, other: str, other_value: Tensor | None) -> Tensor | None:
    if value is not None and other_value is not None:
        raise ArgumentError(other, f"None together with {name}, which is the same", "both")
    return other_value if value is None else value


def _cached(cache_seqlens: int | Tensor | None, num_reqs: int, capacity: int, device: torch.device) -> Tensor:
    """``[num_reqs]`` int32: the tokens in the cache."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    return torch.full(
        (num_reqs,), capacity if cache_seqlens is None else cache_seqlens, dtype=torch.int32, device=device
    )
