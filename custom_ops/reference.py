"""The specification of every op in plain torch: slow, exact, written for reading. Kernels are tested against it.

Dimensions: T tokens, B requests, H heads, K kv heads, D head_dim, L keys of one request, S its queries.
Accumulation is float32, or float64 when the inputs are float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.custom_ops import validation
from torchpaged.custom_ops.attention.mask import visible_keys

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def _quantize(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """``x [T, K, D]`` in the cache's dtype; fp8 values are stored divided by their scale and saturated."""
    if dtype not in FP8_DTYPES:
        return x.to(dtype)
    x = x.float() if scale is None else x.float() / scale.view(1, -1, 1)
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
             k_scale: Tensor | None = None, v_scale: Tensor | None = None, *, are_query_tokens: bool = False) -> None:  # fmt: skip
    """Store ``k``, ``v`` at their slots; slot -1 skips. Two tokens with one slot are refused where values are checked, else undefined.

    ``are_query_tokens`` says when others may start; it changes no result.
    """
    validation.check_write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    _store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def _store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
           k_scale: Tensor | None, v_scale: Tensor | None) -> None:  # fmt: skip
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    block, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
    k_cache[block, offset] = _quantize(k[keep], k_cache.dtype, k_scale)
    v_cache[block, offset] = _quantize(v[keep], v_cache.dtype, v_scale)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """RMSNorm over the last dimension (arXiv:1910.07467); the weight is ``offset + weight``."""
    if weight is None:
        return x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight.to(x.dtype))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of ``x [T, H, D]`` by ``cos, sin [T, 1, rotary_dim // 2]``.

    The pairs that turn together are ``(i, i + rotary_dim // 2)``, or ``(2i, 2i + 1)`` if ``interleaved``.
    """
    half = cos.shape[-1]
    x1, x2 = (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else (x[..., :half], x[..., half : 2 * half])
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    turned = torch.stack([y1, y2], dim=-1).flatten(-2) if interleaved else torch.cat([y1, y2], dim=-1)
    return torch.cat([turned, x[..., 2 * half :]], dim=-1)


def rope_write_kv(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, slot_mapping: Tensor, q_out: Tensor, k_cache: Tensor,
    v_cache: Tensor, *, q_norm: Tensor | None = None, k_norm: Tensor | None = None, norm_eps: float = 1e-6, norm_offset: float = 0.0,
    interleaved: bool = False, k_scale: Tensor | None = None, v_scale: Tensor | None = None, are_query_tokens: bool = False,
) -> None:  # fmt: skip
    """Norm and rotate q into ``q_out``; norm and rotate k and store it with v. One rounding, at the end."""
    validation.check_rope_write_kv(
        q, k, v, positions, cos_sin, slot_mapping, q_out, k_cache, v_cache, q_norm=q_norm, k_norm=k_norm, norm_eps=norm_eps,
        norm_offset=norm_offset, k_scale=k_scale, v_scale=v_scale)  # fmt: skip
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    cos, sin = cos_sin[positions].to(dtype)[:, None].chunk(2, dim=-1)
    q_out.copy_(_rotate(_rms_norm(q.to(dtype), q_norm, norm_eps, norm_offset), cos, sin, interleaved))
    rotated = _rotate(_rms_norm(k.to(dtype), k_norm, norm_eps, norm_offset), cos, sin, interleaved)
    _store(rotated, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def _gather(cache: Tensor, blocks: Tensor, length: int, num_queries_per_kv: int, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """One request's keys or values out of the pool, ``[L, H, D]``, repeated for the query heads of each kv head."""
    x = cache[blocks].flatten(0, 1)[:length].to(dtype)
    if scale is not None:
        x = x * scale.to(dtype).view(1, -1, 1)
    return x.repeat_interleave(num_queries_per_kv, dim=1)


def _weigh(weights: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The sum of ``values [L, H, D]`` by ``weights [H, S, L]``, ``[S, H, D]``. A NaN or inf counts for the queries that see it, in ``mask [S, L]``.

    A product alone would make 0 * NaN of it for the others.
    """
    finite = values.isfinite()
    result = torch.einsum("hsl,lhd->shd", weights, torch.where(finite, values, 0.0))
    for key in (~finite).flatten(1).any(-1).nonzero()[:, 0].tolist():
        bad = torch.where(finite[key], 0.0, values[key])  # [H, D]; times a weight of 0 only where the key is seen
        term = torch.where(finite[key], 0.0, weights[:, :, key].T[..., None] * bad)
        result = result + torch.where(mask[:, key, None, None], term, 0.0)
    return result


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor,
    out: Tensor, lse: Tensor | None = None, *, max_query_len: int, scale: float, causal: bool = True,
    window_left: int = -1, window_right: int = -1, logits_soft_cap: float = 0.0, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None, chunk_size: int = 0,
    semaphore: Tensor | None = None,
) -> None:  # fmt: skip
    """Softmax attention of packed queries over paged keys and values, one request after the other.

    Scores: ``s = scale * q.k``, then ``cap * tanh(s / cap)``, then ``+ slope * (key_pos - query_pos)``, then the mask; a
    sink is one more logit of its head with no value (gpt-oss, arXiv:2309.17453).
    """
    validation.check_paged_attention(
        q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out, lse, max_query_len=max_query_len, scale=scale,
        causal=causal, window_left=window_left, window_right=window_right, logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes, sinks=sinks, k_scale=k_scale, v_scale=v_scale, chunk_size=chunk_size,
        semaphore=semaphore)  # fmt: skip
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    block_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))
    for request, length in enumerate(lengths):
        start, end = starts[request], starts[request + 1]
        if length <= 0 or end == start:
            continue
        blocks = block_table[request, : -(-length // block_size)].long()
        keys = _gather(k_cache, blocks, length, group, dtype, k_scale)  # [L, H, D]
        values = _gather(v_cache, blocks, length, group, dtype, v_scale)
        positions = torch.arange(length - (end - start), length, device=q.device)
        scores = torch.einsum("shd,lhd->hsl", q[start:end].to(dtype), keys) * scale
        if logits_soft_cap > 0:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        if alibi_slopes is not None:
            distance = torch.arange(length, device=q.device)[None, :] - positions[:, None]
            scores = scores + alibi_slopes.to(dtype)[:, None, None] * distance
        mask = visible_keys(positions, length, causal, window_left, window_right, chunk_size)
        scores = scores.masked_fill(~mask, float("-inf"))
        logits = scores
        if sinks is not None:
            logits = torch.cat([scores, sinks.to(dtype).view(-1, 1, 1).expand(-1, end - start, 1)], dim=-1)
        denominator = torch.logsumexp(logits, dim=-1)  # [H, S]
        denominator = denominator.masked_fill(denominator == float("inf"), float("nan"))  # inf / inf, as softmax has it
        sees = mask.any(-1)  # [S]: rows without a key stay zero and -inf
        weights = torch.exp(scores - denominator[..., None]).masked_fill(~mask, 0.0)
        result = _weigh(weights, values, mask)
        out[start:end] = torch.where(sees[:, None, None], result, 0.0).to(out.dtype)
        if lse is not None:
            lse[start:end] = torch.where(sees[:, None], denominator.T, float("-inf")).float()


def merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
    """Combine attention over two disjoint key sets into attention over both (arXiv:2501.01005, section 2.2)."""
    validation.check_merge_attn_states(out_a, lse_a, out_b, lse_b, out, lse)
    dtype = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    total = torch.logaddexp(lse_a.to(dtype), lse_b.to(dtype))
    total = total.masked_fill(total == float("inf"), float("nan"))  # inf / inf, as softmax has it
    terms = []
    for state, state_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.exp(state_lse.to(dtype) - total)[..., None]
        terms.append((weight * state.to(dtype)).masked_fill((state_lse == float("-inf"))[..., None], 0.0))
    result = terms[0] + terms[1]
    out.copy_(result.masked_fill(total.isnan()[..., None], float("nan")))
    if lse is not None:
        lse.copy_(total)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, block_mapping: Tensor) -> None:
    """Copy whole blocks inside a pair of pools: ``cache[destination] = cache[source]``."""
    validation.check_copy_blocks(k_cache, v_cache, block_mapping)
    kept = block_mapping[(block_mapping >= 0).all(-1)]
    for cache in (k_cache, v_cache):
        cache[kept[:, 1]] = cache[kept[:, 0]]


def advance_step(sampled_token_ids: Tensor, block_table: Tensor, input_ids: Tensor, positions: Tensor, seq_lens: Tensor,
                 slot_mapping: Tensor, *, block_size: int) -> None:  # fmt: skip
    """Turn one decode step's buffers into the next one's: token in, position and length + 1, slot from the table."""
    validation.check_advance_step(sampled_token_ids, block_table, input_ids, positions, seq_lens, slot_mapping, block_size=block_size)
    old_lens = seq_lens.long()
    moves = (old_lens > 0) & (old_lens < block_table.shape[1] * block_size)
    column = (old_lens // block_size).clamp_max(block_table.shape[1] - 1)
    block = block_table.long().gather(1, column[:, None])[:, 0]
    slot_mapping.copy_(torch.where(moves, block * block_size + old_lens % block_size, -1))
    input_ids.copy_(torch.where(moves, sampled_token_ids, input_ids))
    positions.copy_(torch.where(moves, old_lens, positions))
    seq_lens.copy_(torch.where(moves, old_lens + 1, old_lens).to(torch.int32))
