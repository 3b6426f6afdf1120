"""cascade_attention: prefixes once, the rest of each request, and both merged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchpaged.cascade.prefixes import SharedPrefixes
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.checks import check_dims, check_tensors, reads_values
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.pools import check_pools
from torchpaged.functional import merge_attn_states, paged_attention
from torchpaged.functional.shared_prefixes import attend_with_prefixes, cascade_ops, has_cascade
from torchpaged.metadata import AttentionMetadata


def cascade_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    prefixes: SharedPrefixes,
    *,
    max_query_len: int,
    suffix: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    ops: BackendOps | None = None,
) -> Any:
    """Causal attention as `torchpaged.paged_attention` computes it, with shared prefixes read once.

    Args:
        q, k_cache, v_cache, block_table, seq_lens, query_start_loc: as in `torchpaged.paged_attention`.
        prefixes: the groups of this batch.
        max_query_len: upper bound of the query lengths.
        suffix: what ``prefixes.suffix(block_table, seq_lens)`` gave; None: computed here. Layers of a step
            share it.
        scale, logits_soft_cap, k_scale, v_scale, ops: as in `torchpaged.paged_attention`.
        sinks: ``[num_heads]``; they count once, in the second pass.
        return_lse: also return the log-sum-exp.

    No windows, chunks or ALiBi: a prefix is seen alike by all queries of its group.

    Returns:
        A tensor ``[num_tokens, num_heads, head_dim_v]`` in q's dtype; with ``return_lse`` a pair of it and
        float32 ``[num_tokens, num_heads]``.

    Raises:
        ArgumentError: arguments don't fit, or, where values are checked, the groups are another batch's.
        BackendUnavailableError: the backend that was asked for can't serve it.
    """
    pools, batch = (k_cache, v_cache), (block_table, seq_lens, query_start_loc)
    suffix = prefixes.suffix(block_table, seq_lens) if suffix is None else suffix
    if not torch.compiler.is_compiling():
        _check(q, *batch, pools, prefixes, suffix)
    own = cascade_ops(q, *pools, scale=scale, logits_soft_cap=logits_soft_cap, sinks=sinks, ops=ops)
    if own is not None:
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        _one_call(
            q,
            pools,
            batch,
            prefixes,
            suffix,
            out,
            lse,
            own,
            max_query_len=max_query_len,
            scale=max(q.shape[-1], 1) ** -0.5 if scale is None else scale,
            logits_soft_cap=logits_soft_cap or 0.0,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    else:
        options: dict[str, Any] = {"scale": scale, "logits_soft_cap": logits_soft_cap}
        options |= {"k_scale": k_scale, "v_scale": v_scale, "return_lse": True, "ops": ops}
        passes = _two_passes(q, pools, batch, prefixes, suffix, max_query_len, sinks, options)
        out, lse = merge_attn_states(*passes, ops=ops)
    return (out, lse) if return_lse else out


def attend_in_groups(
    q: Tensor,
    pools: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    out: Tensor,
    ops: BackendOps,
    sinks: Tensor | None,
    **options: Any,
) -> None:
    """`cascade_attention` for a layer: over the groups of ``metadata.prefixes``, into ``out``.

    Args:
        q, out: as in `cascade_attention`; ``out`` is written.
        pools: ``(k_cache, v_cache)``.
        metadata: with `CascadeBatch`.
        ops: the layer's.
        sinks: as there.
        options: ``scale``, ``logits_soft_cap``, ``k_scale``, ``v_scale``; ``semaphore``, of the layer's
            session.

    Raises:
        ArgumentError: as `cascade_attention`.
    """
    batch = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
    shared, *suffix = metadata.prefixes
    longest = metadata.max_query_len
    if not torch.compiler.is_compiling():
        _check(q, *batch, pools, shared, (suffix[0], suffix[1]))
    own_suffix = suffix[0], suffix[1]
    if has_cascade(ops, q.device):
        options |= {"max_query_len": longest, "sinks": sinks}
        options["logits_soft_cap"] = options.get("logits_soft_cap") or 0.0
        _one_call(q, pools, batch, shared, own_suffix, out, None, ops, **options)
        return
    options.pop("semaphore", None)
    options |= {"return_lse": True, "ops": ops}
    passes = _two_passes(q, pools, batch, shared, own_suffix, longest, sinks, options)
    ops.merge_attn_states(*passes, out)


def _one_call(
    q: Tensor,
    pools: tuple[Tensor, Tensor],
    batch: tuple[Tensor, Tensor, Tensor],
    prefixes: SharedPrefixes,
    suffix: tuple[Tensor, Tensor],
    out: Tensor,
    lse: Tensor | None,
    ops: BackendOps,
    **options: Any,
) -> None:
    """By the op ``cascade_attention``, into ``out`` and ``lse``."""
    groups = prefixes.block_table, prefixes.lens, prefixes.query_start_loc
    tensors = (q, *pools, *suffix, batch[2], *groups, prefixes.order, prefixes.inverse)
    attend_with_prefixes(ops, tensors, out, lse, **options)


def _two_passes(
    q: Tensor,
    pools: tuple[Tensor, Tensor],
    batch: tuple[Tensor, Tensor, Tensor],
    prefixes: SharedPrefixes,
    suffix: tuple[Tensor, Tensor],
    max_query_len: int,
    sinks: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs and LSE over the prefixes, in the batch's order, and over the rest."""
    shared, shared_lse = paged_attention(
        q[prefixes.order],
        *pools,
        prefixes.block_table,
        prefixes.lens,
        prefixes.query_start_loc,
        max_query_len=max(q.shape[0], 1),
        causal=False,  # all of a prefix lies before all queries
        **options,
    )
    own, own_lse = paged_attention(
        q, *pools, *suffix, batch[2], max_query_len=max_query_len, sinks=sinks, **options
    )
    place = prefixes.inverse
    return shared[place], shared_lse[place], own, own_lse


def _check(
    q: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    pools: tuple[Tensor, Tensor],
    prefixes: SharedPrefixes,
    suffix: tuple[Tensor, Tensor],
) -> None:
    k_cache, v_cache = pools
    check_tensors(q=q, block_table=block_table, seq_lens=seq_lens, query_start_loc=query_start_loc)
    check_tensors(k_cache=k_cache, v_cache=v_cache)
    check_dims("q", q, prefixes.order.shape[0], None, None)
    check_pools(k_cache, v_cache)
    check_dims("block_table", block_table, prefixes.shift.shape[0], prefixes.block_table.shape[1])
    check_dims("seq_lens", seq_lens, prefixes.shift.shape[0])
    if k_cache.shape[1] != prefixes.block_size:
        raise ArgumentError("prefixes", f"blocks of {k_cache.shape[1]} tokens", str(prefixes.block_size))
    if not reads_values(q.device):
        return
    shift = prefixes.shift[:, None]
    columns = torch.arange(block_table.shape[1], device=q.device)
    theirs = prefixes.block_table[prefixes.group_of_row]
    wrong = ((block_table != theirs) & (columns < shift)).any(1)
    behind = shift[:, 0] * prefixes.block_size > (seq_lens - query_start_loc.diff()).clamp(min=0)
    wrong = (wrong | behind) & (seq_lens > 0)  # of a request that has ended, nobody reads the output
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ArgumentError(
            "prefixes",
            "the groups of this batch",
            f"shared blocks that row {row} of block_table has not, or not before its queries",
            "call prefixes.set for every batch whose groups change",
        )
    if not _has_tokens_in_groups(query_start_loc, prefixes):
        raise ArgumentError(
            "prefixes",
            "the groups of this batch",
            f"those of other query lengths than query_start_loc {query_start_loc.tolist()} says",
            "call prefixes.set for every batch whose query lengths change",
        )
    table, lens = prefixes.suffix(block_table, seq_lens)
    read = columns * prefixes.block_size < lens[:, None]
    if bool((suffix[1] != lens).any()) or bool(((suffix[0] != table) & read).any()):
        raise ArgumentError(
            "prefixes",
            "what prefixes.suffix gives for this block_table and these seq_lens",
            "that of an earlier step",
            "call SharedPrefixes.of, or suffix, again for each step",
        )


def _has_tokens_in_groups(query_start_loc: Tensor, prefixes: SharedPrefixes) -> bool:
    """Whether each token stands in its request's group, or in none where that has none."""
    token, num_groups = (
        torch.arange(prefixes.order.shape[0], device=prefixes.order.device),
        len(prefixes.lens),
    )
    row = torch.searchsorted(query_start_loc[1:].long(), token, right=True)  # num_reqs: padding
    of_row = torch.where(prefixes.shift > 0, prefixes.group_of_row, num_groups)
    wanted = torch.cat([of_row, of_row.new_full((1,), num_groups)])[row]
    stands_in = torch.searchsorted(prefixes.query_start_loc[1:].long(), prefixes.inverse, right=True)
    return torch.equal(stands_in, wanted)
