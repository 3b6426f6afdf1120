"""Attention with prefixes read once: `cascade_attention` as a function, `attend_with_prefixes` for layers,
and which layers can."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchpaged.backends import AttentionSpec, Session
from torchpaged.backends.choose.for_call import choose_ops
from torchpaged.backends.choose.kind import Kind
from torchpaged.backends.features import BATCH_FEATURES, POSITIONAL_FEATURES
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.cascade_call import CascadeCall, MergeCall
from torchpaged.custom_ops.checks import check_dims, check_tensors, reads_values, refuse_grad
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.pools import KVScales, check_pools
from torchpaged.functional import paged_attention
from torchpaged.prefixes.buffers import SharedPrefixes, StepPrefixes

#: Whose ``cascade_attention`` is more than two calls of their ``paged_attention`` here or its specification.
#: On a CPU the native kernels are called twice; a backend around a library has no such op.
_HAVE_IT = ("reference", "triton", "cuda")


def can_read_once(spec: AttentionSpec, session: Session) -> bool:
    """Whether layers of ``spec`` may read a prefix once for its group: it looks alike to all queries of the
    group, their bits may depend on the batch, and the session's backend can do both passes, without a plan
    and without functions of its own for this spec. If not, requests are read one by one."""
    alike = (POSITIONAL_FEATURES | {"latent"}).isdisjoint(spec.features)
    if not alike or spec.batch_invariant or spec.mods or session.plans:
        return False
    if "mods" in session.workspace(spec):
        return False
    uses = (spec.uses | {"lse"}) - BATCH_FEATURES
    passes = replace(spec, uses=uses - {"sinks"}, causal=False), replace(spec, uses=uses)
    return not any(session.capabilities.reject(one) for one in passes)


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
    output_scale: Tensor | None = None,
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
        scale, logits_soft_cap, k_scale, v_scale, output_scale, ops: as in `torchpaged.paged_attention`.
        sinks: ``[num_heads]``; they count once, in the second pass.
        return_lse: also return the log-sum-exp.

    No windows, chunks or ALiBi: a prefix is seen alike by all queries of its group.

    Returns:
        A tensor ``[num_tokens, num_heads, head_dim_v]`` in q's dtype, with ``output_scale`` of
        float8_e4m3fn; with ``return_lse`` a pair of it and float32 ``[num_tokens, num_heads]``.

    Raises:
        ArgumentError: arguments don't fit, or, where values are checked, the groups are another batch's.
        BackendUnavailableError: the backend that was asked for can't serve it.
    """
    step = StepPrefixes(prefixes, *(prefixes.suffix(block_table, seq_lens) if suffix is None else suffix))
    tensors = q, k_cache, v_cache, block_table, seq_lens, query_start_loc
    if not torch.compiler.is_compiling():
        _check(tensors, step)
    dtype = q.dtype if output_scale is None else torch.float8_e4m3fn
    call = AttentionCall(
        *tensors,
        q.new_empty(*q.shape[:2], v_cache.shape[3], dtype=dtype),
        q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None,
        max_query_len,
        scale=max(q.shape[-1], 1) ** -0.5 if scale is None else scale,
        logits_soft_cap=logits_soft_cap or 0.0,
        sinks=sinks,
        scales=KVScales(k_scale, v_scale),
        output_scale=output_scale,
    )
    kind = Kind.of(call)
    if call.lse is None:  # two passes need it of each other
        kind = kind._replace(given=(*kind.given, "lse"))
    _attend(choose_ops(kind, ops), call, step)
    return call.out if call.lse is None else (call.out, call.lse)


def attend_with_prefixes(ops: BackendOps, call: AttentionCall, step: StepPrefixes) -> None:
    """`cascade_attention` for a layer that `can_read_once`, in the place of its call of ``paged_attention``.

    Args:
        ops: the layer's.
        call: what it would ask of ``paged_attention``, causal and without ``lse``; ``out`` is written.
        step: ``metadata.prefixes``.

    Raises:
        ArgumentError: as `cascade_attention`.
    """
    if not torch.compiler.is_compiling():
        _check(call[:6], step)
    _attend(ops, call, step)


def _attend(ops: BackendOps, call: AttentionCall, step: StepPrefixes) -> None:
    """By the op ``cascade_attention`` where these handles have one, or else in two passes."""
    refuse_grad(q=call.q, sinks=call.sinks, output_scale=call.output_scale)
    if _has_op(ops, call.q.device):
        _one_call(ops, call, step)
    else:
        merged = MergeCall(*_two_passes(call, step, ops), call.out, call.lse, call.output_scale)
        tensors, options = merged.flat()
        ops.merge_attn_states(*tensors, **options)


def _has_op(ops: BackendOps, device: torch.device) -> bool:
    """Whether these handles have a ``cascade_attention`` of their own on a device."""
    names = (*_HAVE_IT, "default") if device.type == "cuda" else _HAVE_IT
    return any(ops.paged_attention is BACKEND_OPS[name].paged_attention for name in names)


def _one_call(ops: BackendOps, call: AttentionCall, step: StepPrefixes) -> None:
    """By the op ``cascade_attention``, which checks its arguments."""
    own, shared = call._replace(block_table=step.block_table, seq_lens=step.seq_lens), step.shared
    groups = shared.block_table, shared.lens, shared.query_start_loc, shared.order, shared.inverse
    tensors, options = CascadeCall(own, *groups).flat()
    ops.cascade_attention(*tensors, **options)


def _two_passes(
    call: AttentionCall, step: StepPrefixes, ops: BackendOps
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs and LSE over the prefixes, in the batch's order, and over the rest."""
    q, shared, pools = call.q, step.shared, (call.k_cache, call.v_cache)
    options: dict[str, Any] = {"scale": call.scale, "logits_soft_cap": call.logits_soft_cap, "ops": ops}
    options |= {**call.scales.by_name, "return_lse": True}
    over_prefixes, prefix_lse = paged_attention(
        q[shared.order],
        *pools,
        shared.block_table,
        shared.lens,
        shared.query_start_loc,
        max_query_len=max(q.shape[0], 1),
        causal=False,  # all of a prefix lies before all queries
        **options,
    )
    own, own_lse = paged_attention(
        q,
        *pools,
        step.block_table,
        step.seq_lens,
        call.query_start_loc,
        max_query_len=call.max_query_len,
        sinks=call.sinks,
        **options,
    )
    return over_prefixes[shared.inverse], prefix_lse[shared.inverse], own, own_lse


def _check(tensors: tuple[Tensor, ...], step: StepPrefixes) -> None:
    """What the op can't see: the groups are this batch's. ``tensors``: an `AttentionCall`'s first ones."""
    (q, k_cache, v_cache, block_table, seq_lens, query_start_loc), prefixes = tensors, step.shared
    check_tensors(**dict(zip(AttentionCall._fields, tensors, strict=False)))
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
    wrong = (wrong | behind) & (seq_lens > 0)  # the output of a request that has ended is not read
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
    if bool((step.seq_lens != lens).any()) or bool(((step.block_table != table) & read).any()):
        raise ArgumentError(
            "prefixes",
            "what prefixes.suffix gives for this block_table and these seq_lens",
            "that of an earlier step",
            "call SharedPrefixes.prepare, or suffix, again for each step",
        )


def _has_tokens_in_groups(query_start_loc: Tensor, prefixes: SharedPrefixes) -> bool:
    """Whether each token stands in its request's group, or in none where that has none."""
    token, num_groups = torch.arange(len(prefixes.order), device=prefixes.order.device), len(prefixes.lens)
    row = torch.searchsorted(query_start_loc[1:].long(), token, right=True)  # num_reqs: padding
    of_row = torch.where(prefixes.shift > 0, prefixes.group_of_row, num_groups)
    wanted = torch.cat([of_row, of_row.new_full((1,), num_groups)])[row]
    stands_in = torch.searchsorted(prefixes.query_start_loc[1:].long(), prefixes.inverse, right=True)
    return torch.equal(stands_in, wanted)
