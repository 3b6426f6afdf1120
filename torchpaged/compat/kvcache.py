"""FlashAttention's call over a KV cache (the signature of version 3), on the kernels of torchpaged."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.compat.arguments import (
    argument_error,
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
from torchpaged.compat.rotary import check_rotary, rotate
from torchpaged.custom_ops.checks import check_dims, check_dtype, check_tensors, is_int, reads_values
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


class _Tokens(NamedTuple):
    """Packed tokens: ``[num_tokens, heads, width]``, the request of each, its place among that request's, and
    how many each request has."""

    x: Tensor
    request: Tensor  # [num_tokens] int64
    place: Tensor  # [num_tokens] int32
    are_real: Tensor | None  # [num_tokens] bool; None: all
    counts: Tensor  # [num_reqs] int32
    starts: Tensor  # [num_reqs + 1] int32


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
        k, v: ``[num_reqs, seqlen_new, num_kv_heads, head_dim(_v)]``, or ``[total_new, num_kv_heads,
            head_dim(_v)]`` with ``cu_seqlens_k_new``: stored behind the first ``cache_seqlens`` tokens of
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
        _check(
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
    queries = _tokens(q, cu_seqlens_q)
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
        new = _tokens(k, cu_seqlens_k_new), _tokens(v, cu_seqlens_k_new)
        seq_lens = lens + new[0].counts
        if rotary_cos is not None and rotary_sin is not None:
            first = lens if rotary_seqlens is None else rotary_seqlens
            all_first = not is_causal and window == (-1, -1)
            if is_eager():
                check_rotary(
                    new[0].x, rotary_cos, rotary_sin, first + torch.maximum(new[0].counts, queries.counts) - 1
                )
            packed = _rotated(queries, rotary_cos, rotary_sin, first, rotary_interleaved, all_first)
            new = (
                new[0]._replace(x=_rotated(new[0], rotary_cos, rotary_sin, first, rotary_interleaved, False)),
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
            raise argument_error(
                "k_descale",
                "the same for all requests, since new keys are stored",
                "descales of each request",
            )
        if is_eager():
            by_their_names(_NAMES, lambda: call.check(flat_out))
        slots = _slots(new[0], lens, table, k_pool.shape[1])
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
        raise argument_error(other, f"None beside {name}, which is the same", "both")
    return other_value if value is None else value


def _tokens(x: Tensor, starts: Tensor | None) -> _Tokens:
    if starts is None:
        num_reqs, each = x.shape[:2]
        index = torch.arange(num_reqs * each, device=x.device)
        counts = torch.full((num_reqs,), each, dtype=torch.int32, device=x.device)
        bounds = torch.arange(num_reqs + 1, dtype=torch.int32, device=x.device) * each
        return _Tokens(
            x.reshape(-1, *x.shape[2:]), index // each, (index % each).to(torch.int32), None, counts, bounds
        )
    index = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    request = torch.searchsorted(starts[1:], index, right=True)
    are_real = index < starts[-1]
    request = request.clamp(max=starts.shape[0] - 2)
    return _Tokens(x, request, index - starts[:-1][request], are_real, starts.diff(), starts)


def _cached(cache_seqlens: int | Tensor | None, num_reqs: int, capacity: int, device: torch.device) -> Tensor:
    """``[num_reqs]`` int32: the tokens in the cache."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    return torch.full(
        (num_reqs,), capacity if cache_seqlens is None else cache_seqlens, dtype=torch.int32, device=device
    )


def _rotated(
    tokens: _Tokens, cos: Tensor, sin: Tensor, first: Tensor, interleaved: bool, all_first: bool
) -> Tensor:
    positions = first[tokens.request]
    return rotate(tokens.x, cos, sin, positions if all_first else positions + tokens.place, interleaved)


def _slots(new: _Tokens, lens: Tensor, table: Tensor, block_size: int) -> Tensor:
    """``[num_tokens]`` int64: where each new token is stored; -1 of padding and of what has no place in the
    table."""
    position = lens[new.request] + new.place
    column = position // block_size
    block = table[new.request, column.clamp(0, table.shape[1] - 1)].long()
    has_place = column < table.shape[1] if new.are_real is None else (column < table.shape[1]) & new.are_real
    return torch.where(has_place, block * block_size + position % block_size, -1)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    max_seqlen_q: int | None,
    rotary_seqlens: Tensor | None,
) -> None:
    """What only this door asks; the rest is checked with the ops' arguments."""
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    check_dims("k_cache", k_cache, None, None, None, None)
    check_dims("v_cache", v_cache, None, None, None, None)
    if cu_seqlens_q is None:
        check_dims("q", q, None, None, None, None)
        num_reqs = q.shape[0]
        if max_seqlen_q is not None and max_seqlen_q < q.shape[1]:
            raise ArgumentError(
                "max_seqlen_q", f"None or at least seqlen_q ({q.shape[1]})", repr(max_seqlen_q)
            )
    else:
        check_tensors(cu_seqlens_q=cu_seqlens_q)
        check_dims("q", q, None, None, None)
        check_dims("cu_seqlens_q", cu_seqlens_q, None)
        check_dtype("cu_seqlens_q", cu_seqlens_q, torch.int32)
        num_reqs = cu_seqlens_q.shape[0] - 1
        if not is_int(max_seqlen_q):
            raise ArgumentError(
                "max_seqlen_q", "an int with cu_seqlens_q, an upper bound of the lengths", repr(max_seqlen_q)
            )
    for name, tensor in (
        ("cache_batch_idx", cache_batch_idx),
        ("rotary_seqlens", rotary_seqlens),
        ("cache_seqlens", cache_seqlens),
    ):
        if isinstance(tensor, Tensor):
            check_dims(name, tensor, num_reqs)
            check_dtype(name, tensor, torch.int32)
    if (
        not isinstance(cache_seqlens, Tensor)
        and cache_seqlens is not None
        and (not is_int(cache_seqlens) or cache_seqlens < 0)
    ):
        raise ArgumentError("cache_seqlens", "None, an int of at least 0 or a tensor", repr(cache_seqlens))
    if table is not None and cache_batch_idx is not None:
        raise ArgumentError("cache_batch_idx", "None beside page_table, which has a row per request", "both")
    if table is None and cache_batch_idx is not None and num_reqs and reads_values(q.device):
        low, high = (int(x) for x in torch.aminmax(cache_batch_idx))
        if low < 0 or high >= k_cache.shape[0]:
            raise ArgumentError(
                "cache_batch_idx", f"rows in [0, {k_cache.shape[0]})", f"values in [{low}, {high}]"
            )
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise ArgumentError(
            "rotary_cos, rotary_sin", "both or neither, and with k and v only", "one of them, or no k"
        )
    if rotary_seqlens is not None and rotary_cos is None:
        raise ArgumentError("rotary_seqlens", "None without rotary_cos", "a tensor")
    if cu_seqlens_k_new is not None and k is None:
        raise ArgumentError("cu_seqlens_k_new", "None without k and v", "a tensor")
    if (k is None) != (v is None):
        raise ArgumentError("k, v", "both or neither", f"k {'None' if k is None else 'given'}")
    if k is not None and v is not None:
        _check_new(k, v, k_cache, v_cache, cache_seqlens, table, num_reqs, cu_seqlens_k_new)


def _check_new(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    table: Tensor | None,
    num_reqs: int,
    cu_seqlens_k_new: Tensor | None,
) -> None:
    if cache_seqlens is None:
        raise ArgumentError(
            "cache_seqlens", "the tokens that are in the cache, since new ones are stored", "None"
        )
    heads = k_cache.shape[2]
    if cu_seqlens_k_new is None:
        check_dims("k", k, num_reqs, None, heads, k_cache.shape[3])
        check_dims("v", v, num_reqs, k.shape[1], heads, v_cache.shape[3])
        most: Any = k.shape[1]
    else:
        check_dims("k", k, None, heads, k_cache.shape[3])
        check_dims("v", v, k.shape[0], heads, v_cache.shape[3])
        check_dims("cu_seqlens_k_new", cu_seqlens_k_new, num_reqs + 1)
        check_dtype("cu_seqlens_k_new", cu_seqlens_k_new, torch.int32)
        most = cu_seqlens_k_new.diff() if reads_values(k.device) else 0
    if num_reqs and reads_values(k.device):
        width = 1 if table is None else table.shape[1]
        longest = int(torch.as_tensor(cache_seqlens + most).max())
        if longest > width * k_cache.shape[1]:
            raise ArgumentError(
                "cache_seqlens",
                f"room for the new tokens in {width * k_cache.shape[1]} of each request",
                str(longest),
            )
