"""The specification of attention in plain torch: slow, exact, written for reading. Kernels are tested
against it.

Dimensions: T tokens, B requests, H heads, K kv heads, D head_dim, L keys of one request, S its queries.
Accumulation is float32, or float64 when the inputs are float64.
"""

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.cascade_call import CascadeCall, MergeCall
from torchpaged.custom_ops.attention.check import (
    check_cascade_attention,
    check_merge_attn_states,
    check_paged_attention,
    group_of_rows,
)
from torchpaged.custom_ops.attention.mask import tree_positions
from torchpaged.custom_ops.plain_torch import exact_dtype


def _gather(
    cache: Tensor,
    blocks: Tensor,
    length: int,
    num_queries_per_kv: int,
    dtype: torch.dtype,
    scale: Tensor | None,
) -> Tensor:
    """One request's keys or values out of the pool, ``[L, H, D]``, repeated for the query heads of each
    kv head."""
    x = cache[blocks].flatten(0, 1)[:length].to(dtype)
    if scale is not None:
        x = x * scale.to(dtype).view(1, -1, 1)
    return x.repeat_interleave(num_queries_per_kv, dim=1)


def _weigh(weights: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The sum of ``values [L, H, D]`` by ``weights [H, S, L]``, ``[S, H, D]``. A NaN or inf counts for the
    queries that see it, in ``mask [H or 1, S, L]``.

    A product alone would make 0 * NaN of it for the others.
    """
    finite = values.isfinite()
    result = torch.einsum("hsl,lhd->shd", weights, torch.where(finite, values, 0.0))
    for key in (~finite).flatten(1).any(-1).nonzero()[:, 0].tolist():
        # [H, D]; times a weight of 0 only where the key is seen
        bad = torch.where(finite[key], 0.0, values[key])
        term = torch.where(finite[key], 0.0, weights[:, :, key].T[..., None] * bad)
        result = result + torch.where(mask[:, :, key].T[..., None], term, 0.0)
    return result


def stored(result: Tensor, dtype: torch.dtype, output_scale: Tensor | None) -> Tensor:
    """``result`` as it is written: over the scale, if there is one, and then saturated. NaN stays NaN."""
    if output_scale is not None:
        most = torch.finfo(dtype).max
        result = (result / output_scale.to(result.dtype)).clamp(-most, most)
    return result.to(dtype)


def paged_attention(call: AttentionCall) -> None:
    """Softmax attention of packed queries over paged keys and values, one request after the other.

    Scores: ``s = scale * q.k``, then ``cap * tanh(s / cap)``, then ``+ slope * (key_pos - query_pos)``, then
    the mask; a sink is one more logit of its head with no value (gpt-oss, arXiv:2309.17453). With a
    ``tree_mask`` (tree attention, arXiv:2305.09781) positions are as each query counts them, see
    `tree_positions`.
    """
    check_paged_attention(call, fp8_queries=True)
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out, lse = call[:8]
    # of what fp8 queries stand for, nothing is rounded before the end
    dtype = exact_dtype(call.dtype)
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
        keys = _gather(k_cache, blocks, length, group, dtype, call.scales.k_scale)  # [L, H, D]
        values = _gather(v_cache, blocks, length, group, dtype, call.scales.v_scale)
        order = torch.arange(length - (end - start), length, device=q.device)
        queries, keys_at, hidden = order, torch.arange(length, device=q.device), None
        if call.tree_mask is not None:
            queries, keys_at, hidden = tree_positions(call.tree_mask[start:end], length)
        # A copy: products give other bits at other alignments, and the requests before must not matter.
        own = q[start:end].to(dtype, copy=True)
        scores = torch.einsum("shd,lhd->hsl", own, keys) * call.scale
        if call.logits_soft_cap > 0:
            scores = call.logits_soft_cap * torch.tanh(scores / call.logits_soft_cap)
        if call.alibi_slopes is not None:
            scores = scores + call.alibi_slopes.to(dtype)[:, None, None] * (keys_at - queries[:, None])
        heads = torch.arange(q.shape[1], device=q.device)[:, None, None]
        mask = call.mask.sees(queries[:, None], keys_at, heads) & (order >= 0)[:, None]
        mask = mask.view(-1, *scores.shape[1:])  # [H or 1, S, L]
        if hidden is not None:
            mask = mask & ~hidden
        scores = scores.masked_fill(~mask, float("-inf"))
        logits = scores
        if call.sinks is not None:
            logits = torch.cat(
                [scores, call.sinks.to(dtype).view(-1, 1, 1).expand(-1, end - start, 1)], dim=-1
            )
        denominator = torch.logsumexp(logits, dim=-1)  # [H, S]
        # inf / inf, as softmax has it
        denominator = denominator.masked_fill(denominator == float("inf"), float("nan"))
        sees = mask.any(-1).T  # [S, H or 1]: rows without a key stay zero and -inf
        weights = torch.exp(scores - denominator[..., None]).masked_fill(~mask, 0.0)
        result = _weigh(weights, values, mask)
        out[start:end] = stored(torch.where(sees[..., None], result, 0.0), out.dtype, call.output_scale)
        if lse is not None:
            lse[start:end] = torch.where(sees, denominator.T, float("-inf")).float()


def merge_attn_states(call: MergeCall) -> None:
    """Combine attention over two disjoint key sets into attention over both (arXiv:2501.01005,
    section 2.2)."""
    check_merge_attn_states(call)
    dtype = exact_dtype(call.out_a.dtype)
    total = torch.logaddexp(call.lse_a.to(dtype), call.lse_b.to(dtype))
    total = total.masked_fill(total == float("inf"), float("nan"))  # inf / inf, as softmax has it
    terms = []
    for state, state_lse in call.states:
        weight = torch.exp(state_lse.to(dtype) - total)[..., None]
        terms.append((weight * state.to(dtype)).masked_fill((state_lse == float("-inf"))[..., None], 0.0))
    result = terms[0] + terms[1]
    result = result.masked_fill(total.isnan()[..., None], float("nan"))
    call.out.copy_(stored(result, call.out.dtype, call.output_scale))
    if call.lse is not None:
        call.lse.copy_(total)


def cascade_attention(call: CascadeCall) -> None:
    """Plain attention over each request's whole context; arguments as in
    ``custom_ops/attention/schema.py``."""
    check_cascade_attention(call)
    table, lens = _whole(call)
    paged_attention(call.own._replace(block_table=table, seq_lens=lens))


def _whole(call: CascadeCall) -> tuple[Tensor, Tensor]:
    """Block table and lengths of the requests with their groups' blocks in front."""
    own, prefix_table, prefix_lens, prefix_starts, _, inverse = call
    table, lens, starts, size = own.block_table, own.seq_lens, own.query_start_loc, own.k_cache.shape[1]
    num_groups, num_reqs = prefix_lens.shape[0], lens.shape[0]
    group = torch.cat([group_of_rows(inverse, prefix_starts), inverse.new_tensor([num_groups])])
    first = torch.where(starts.diff() > 0, starts[:-1].long(), group.shape[0] - 1)
    blocks = torch.cat([prefix_lens // size, prefix_lens.new_zeros(1)])[group[first]]
    shared = torch.cat([prefix_table, prefix_table.new_zeros(1, prefix_table.shape[1])])[group[first]]
    both = torch.cat([shared, table], 1)
    columns = torch.arange(both.shape[1], device=table.device).expand(num_reqs, -1)
    source = torch.where(
        columns < blocks[:, None], columns, columns - blocks[:, None] + prefix_table.shape[1]
    )
    return both.gather(1, source.clamp(max=max(both.shape[1] - 1, 0))), lens + blocks * size
