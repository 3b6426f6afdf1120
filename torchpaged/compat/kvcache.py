"""FlashAttention's call over a KV cache (the signature of version 3), on the kernels of torchpaged."""

from typing import Any

import torch
from torch import Tensor

from torchpaged.compat.arguments import (
    NAMES,
    by_their_names,
    check_out,
    is_eager,
    note_hints,
    options_of,
    refuse,
    refuse_invariant_splits,
)
from torchpaged.compat.call import Descales, PackedCall
from torchpaged.compat.kvcache_check import CacheTokens, Tokens, check_rotary, rotated, slots_of, tokens_of
from torchpaged.compat.packed import rows_as_pools
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.functional import write_kv

_LENS = dict.fromkeys(("seq_lens", "slot_mapping"), "cache_seqlens")
_NAMES = NAMES | _LENS | {"block_table": "page_table", "chunk_size": "attention_chunk"}


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
    rotary = rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens
    where = cache_seqlens, cache_batch_idx, _one_of("page_table", page_table, "block_table", block_table)
    rest = *rotary, *where, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q
    tokens = CacheTokens(q, k_cache, v_cache, k, v, *rest)
    sink_logits = _one_of("sinks", sinks, "s_aux", s_aux)
    options = options_of(
        softmax_scale, causal, window_size, softcap, alibi_slopes, sink_logits, attention_chunk
    )
    if not options["causal"]:
        refuse(name, expected=0, attention_chunk=attention_chunk)
    if is_eager():
        tokens.check()
    descales = (q_descale, k_descale, v_descale)
    call, new, lens = _packed_call(tokens, options, descales)
    if new is not None and (call.k_descale is not None or call.v_descale is not None):
        raise ArgumentError(
            "k_descale", "the same for all requests, since new keys are stored", "descales of each request"
        )
    flat_out = None
    if out is not None:
        if is_eager():
            check_out(out, q, v_cache.shape[-1])
        flat_out = out if cu_seqlens_q is not None else out.view(-1, *out.shape[2:])
    if new is not None:
        if is_eager():
            by_their_names(_NAMES, lambda: call.check(flat_out, return_softmax_lse))
        by_their_names(_NAMES, lambda: _store(call, new, lens, k_cache, v_cache))
    result, lse = by_their_names(_NAMES, lambda: call.run(flat_out, return_softmax_lse))
    if cu_seqlens_q is not None:
        return result if lse is None else (result, lse.transpose(0, 1).contiguous())
    result = result.view(*q.shape[:3], result.shape[-1])
    if lse is None:
        return result
    return result, lse.view(*q.shape[:2], -1).transpose(1, 2).contiguous()


def _packed_call(
    tokens: CacheTokens, options: dict[str, Any], descales: Descales
) -> tuple[PackedCall, tuple[Tokens, Tokens] | None, Tensor]:
    """The call over pools; the new keys and values, turned; and the tokens in the cache without them."""
    queries = tokens_of(tokens.q, tokens.cu_seqlens_q)
    num_reqs = queries.counts.shape[0]
    k_pool, v_pool, table = tokens.k_cache, tokens.v_cache, tokens.page_table
    if table is None:
        k_pool, v_pool, table = rows_as_pools(k_pool, v_pool, tokens.cache_batch_idx, num_reqs)
    lens = tokens.cache_seqlens
    if not isinstance(lens, Tensor):
        capacity = table.shape[1] * k_pool.shape[1]
        count = capacity if lens is None else lens
        lens = torch.full((num_reqs,), count, dtype=torch.int32, device=tokens.q.device)
    packed, seq_lens, new = queries.x, lens, None
    if tokens.k is not None and tokens.v is not None:
        new_k, new_v = (tokens_of(x, tokens.cu_seqlens_k_new) for x in (tokens.k, tokens.v))
        seq_lens = lens + new_k.counts
        if tokens.rotary_cos is not None and tokens.rotary_sin is not None:
            tables = tokens.rotary_cos, tokens.rotary_sin
            first = lens if tokens.rotary_seqlens is None else tokens.rotary_seqlens
            all_first = not options["causal"] and options["window_size"] == (-1, -1)
            if is_eager():
                last = first.long() + torch.maximum(new_k.counts, queries.counts) - 1
                check_rotary(new_k.x, *tables, last)
            packed = rotated(queries, *tables, first, tokens.rotary_interleaved, all_first)
            new_k = new_k._replace(x=rotated(new_k, *tables, first, tokens.rotary_interleaved, False))
        new = new_k, new_v
    longest = (tokens.q.shape[1] if tokens.cu_seqlens_q is None else tokens.max_seqlen_q) or 1
    batch = table, seq_lens, queries.starts
    return PackedCall(packed, (k_pool, v_pool), batch, longest, options, descales), new, lens


def _store(
    call: PackedCall, new: tuple[Tokens, Tokens], lens: Tensor, k_cache: Tensor, v_cache: Tensor
) -> None:
    """The new keys and values behind the first ``lens`` tokens of each request."""
    slots = slots_of(new[0], lens, call.block_table, call.k_cache.shape[1])
    scales = (call.options["k_scale"], call.options["v_scale"])
    write_kv(new[0].x, new[1].x, k_cache, v_cache, slots, *scales)


def _one_of(name: str, value: Tensor | None, other: str, other_value: Tensor | None) -> Tensor | None:
    if value is not None and other_value is not None:
        raise ArgumentError(other, f"None together with {name}, which is the same", "both")
    return other_value if value is None else value
