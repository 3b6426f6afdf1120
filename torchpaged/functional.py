"""The ops as functions: arguments checked with typed errors, outputs allocated and returned.

    write_kv(k, v, k_cache, v_cache, slot_mapping)
    out = paged_attention(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_query_len=1)

They run the backend that every other door would choose: `torchpaged.use_backend`, TORCHPAGED_BACKEND, then
the automatic choice; one that was asked for and can't serve a call raises with its reasons.
``ops=BACKEND_OPS[name]`` runs one backend's kernels whatever was asked for.

Under ``torch.compile`` they trace to one op call (and one allocation). The backend is chosen when the call is
traced, by the same rules, and the compiled code keeps it; heads, widths and block size are constants of it.
``ops`` are held to what their backend declares there, too; a backend that plans needs a workspace. The checks
of tensors run in eager mode only. Inference only: they refuse inputs that require grad.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.backends import AttentionSpec, Backend, Limits, Session, attention_spec, backend_of
from torchpaged.backends.ops_choice import choose_ops, registered, traced_ops
from torchpaged.custom_ops import BACKEND_OPS, BackendOps, check_native_dtype
from torchpaged.custom_ops.attention.check import (
    check_merge_attn_states,
    check_options,
    check_paged_attention,
)
from torchpaged.custom_ops.block_ops.check import check_copy_blocks
from torchpaged.custom_ops.cache_write.check import check_rope_write_kv, check_write_kv
from torchpaged.custom_ops.checks import check_tensors, is_int, refuse_grad
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError
from torchpaged.custom_ops.step_end.check import check_advance_step

_DEFAULT = BACKEND_OPS["default"]


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


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
            this write runs, which saves a microsecond or two on Hopper. Without the promise any call
            may follow.
        ops: whose kernels to run; default: those of the backend that every other door would choose.

    Raises:
        ArgumentError: shapes, dtypes, devices, strides or slots don't fit; nothing is written then.
        BackendUnavailableError: the backend that was asked for can't serve this; with all reasons.
    """
    if not torch.compiler.is_compiling():
        check_tensors(
            k=k,
            v=v,
            k_cache=k_cache,
            v_cache=v_cache,
            slot_mapping=slot_mapping,
            **_given(k_scale=k_scale, v_scale=v_scale),
        )
        refuse_grad(k=k, v=v)
        check_write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        ops = choose_ops(k.device, _written_for(k, v, k_cache)) if ops is None else ops
        check_native_dtype(ops.write_kv, k_cache=k_cache)
    elif ops is None:
        ops = traced_ops(k.device, _traced(k, k_cache, v), planned=True)
    ops.write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, are_query_tokens=are_query_tokens)


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
        are_query_tokens: as in `write_kv`.
        ops: whose kernels to run; default: as the module docstring says (backend ``cpu`` runs the reference
            here: there is no native kernel).

    Returns:
        The rotated queries, ``[num_tokens, num_heads, head_dim]`` in q's dtype, contiguous.

    Raises:
        ArgumentError: shapes, dtypes, devices, strides, positions or slots don't fit; nothing is
            written then.
        BackendUnavailableError: the backend that was asked for can't serve this; with all reasons.
    """
    if not torch.compiler.is_compiling():
        check_tensors(
            q=q,
            k=k,
            v=v,
            positions=positions,
            cos_sin=cos_sin,
            k_cache=k_cache,
            v_cache=v_cache,
            slot_mapping=slot_mapping,
            **_given(q_norm=q_norm, k_norm=k_norm, k_scale=k_scale, v_scale=v_scale),
        )
    q_out = q.new_empty(q.shape)
    if not torch.compiler.is_compiling():
        refuse_grad(q=q, k=k, v=v, q_norm=q_norm, k_norm=k_norm)
        check_rope_write_kv(
            q,
            k,
            v,
            positions,
            cos_sin,
            slot_mapping,
            q_out,
            k_cache,
            v_cache,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=norm_eps,
            norm_offset=norm_offset,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        ops = choose_ops(q.device, _written_for(k, v, k_cache)) if ops is None else ops
    elif ops is None:
        ops = traced_ops(q.device, _traced(k, k_cache, v), planned=True)
    ops.rope_write_kv(
        q,
        k,
        v,
        positions,
        cos_sin,
        slot_mapping,
        q_out,
        k_cache,
        v_cache,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=norm_eps,
        norm_offset=norm_offset,
        interleaved=interleaved,
        k_scale=k_scale,
        v_scale=v_scale,
        are_query_tokens=are_query_tokens,
    )
    return q_out


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    max_query_len: int,
    scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    chunk_size: int | None = None,
    workspace: Mapping[str, Tensor] | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    ops: BackendOps | None = None,
) -> Any:
    """Attention of packed queries over paged keys and values: prefill, decode, chunked prefill and mixed
    batches alike.

    Query ``i`` of a request sees keys up to ``seq_len - query_len + i`` (bottom-right causal alignment).

    Args:
        q: ``[num_tokens, num_heads, head_dim]``, requests one after the other.
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``.
        v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim_v]``.
        block_table: ``[num_reqs, max_blocks_per_req]`` int32.
        seq_lens: ``[num_reqs]`` int32, this step's tokens included; 0 = padding row.
        query_start_loc: ``[num_reqs + 1]`` int32.
        max_query_len: upper bound of the query lengths.
        scale: softmax scale; default ``head_dim ** -0.5``.
        causal: hide keys after the query.
        window_size: ``(left, right)`` keys visible beside the own one; -1 = open.
        logits_soft_cap: scores become ``cap * tanh(score / cap)``; None or 0 = off.
        alibi_slopes: ``[num_heads]`` float32.
        sinks: ``[num_heads]``, one logit per head that takes part in the softmax without a value.
        k_scale, v_scale: float32 ``[1]`` or ``[num_kv_heads]``, for fp8 pools.
        chunk_size: keys of the query's own chunk of that many positions only; None or 0 = off.
        workspace: what a session of the backend of ``ops`` keeps for this kind of call:
            ``session.workspace(spec)``; the session has planned the batch if it plans at all. None: nothing
            is kept: a GPU kernel makes its semaphore anew, which costs a memset, and a backend that plans
            plans for this call alone, which compiled code can't.
        return_lse: also return the log-sum-exp.
        out: ``[num_tokens, num_heads, head_dim_v]`` in q's dtype to write into, which is returned; apart from
            q and the pools, any strides with a contiguous last dimension. None: a new one.
        ops: whose kernels to run; default: those of the backend that every other door would choose.

    Returns:
        A tensor ``[num_tokens, num_heads, head_dim_v]`` in q's dtype; with ``return_lse`` a pair of it and
        float32 ``[num_tokens, num_heads]``.

    Raises:
        ArgumentError: shapes, dtypes, devices, strides, block ids, lengths or options don't fit.
        BackendUnavailableError: ``ops``, or the backend that was asked for, declare not to run this; with
            all reasons.
    """
    kept: Mapping[str, Any] = {} if workspace is None else workspace
    if not torch.compiler.is_compiling():
        if not isinstance(kept, Mapping):
            raise ArgumentError(
                "workspace",
                "tensors by argument name",
                type(workspace).__name__,
                "pass session.workspace(spec)",
            )
        if ops is not None and not isinstance(ops, BackendOps):
            raise ArgumentError(
                "ops",
                "handles of a backend's ops",
                repr(ops),
                "pass BACKEND_OPS[name], or choose by use_backend(name)",
            )
        if not (is_int(max_query_len) or isinstance(max_query_len, torch.SymInt)):
            raise ArgumentError("max_query_len", "an int of at least 1", repr(max_query_len))
        check_options(scale, window_size, logits_soft_cap, chunk_size)
        check_tensors(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            block_table=block_table,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            **_given(alibi_slopes=alibi_slopes, sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=out),
            **kept,
        )
        # of these the outputs take their shape
        for name, tensor in (
            ("q", q),
            ("k_cache", k_cache),
            ("v_cache", v_cache),
        ):
            if not tensor.dim() == (3 if name == "q" else 4):
                raise ArgumentError(name, f"{3 if name == 'q' else 4} dimensions", str(list(tensor.shape)))
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3]) if out is None else out
    lse = q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32) if return_lse else None
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    soft_cap = 0.0 if logits_soft_cap is None else logits_soft_cap
    chunk = 0 if chunk_size is None else chunk_size
    if not torch.compiler.is_compiling():
        refuse_grad(q=q, sinks=sinks, alibi_slopes=alibi_slopes)
        check_paged_attention(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            query_start_loc,
            out,
            lse,
            max_query_len=max_query_len,
            scale=scale,
            causal=causal,
            window_left=window_size[0],
            window_right=window_size[1],
            logits_soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            chunk_size=chunk,
            semaphore=kept.get("semaphore"),
        )
        spec = attention_spec(
            device=q.device,
            dtype=q.dtype,
            num_heads=q.shape[1],
            num_kv_heads=k_cache.shape[2],
            head_dim=q.shape[2],
            head_dim_v=v_cache.shape[3],
            block_size=k_cache.shape[1],
            kv_dtype=k_cache.dtype,
            causal=causal,
            window_size=window_size,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            chunk_size=chunk_size,
            lse=return_lse,
            scale=scale,
        )
        if ops is None:
            ops = choose_ops(q.device, spec)
        check_native_dtype(ops.paged_attention, q=q, k_cache=k_cache)
        if ops is not _DEFAULT:
            backend = _able(_Handles(ops), spec, registered())
            if backend is not None and workspace is None and backend.capabilities.planning:
                batch = _OneCall(block_table, seq_lens, query_start_loc, max_query_len)
                # a variable of this function, since it must live until the op has run
                session = _planned_once(backend, spec, batch, q.shape[0], k_cache)
                kept = session.workspace(spec)
    else:
        window = operator.index(window_size[0]), operator.index(window_size[1])
        has_soft_cap = False
        if soft_cap != 0:  # a symbol perhaps, which a branch makes a constant
            has_soft_cap = True
        given = has_soft_cap, alibi_slopes is not None, sinks is not None, return_lse
        attention = (*_traced(q, k_cache, v_cache), causal, window, operator.index(chunk), *given)
        ops = traced_ops(q.device, attention, ops, workspace is not None)
    ops.paged_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        lse,
        max_query_len=max_query_len,
        scale=scale,
        causal=causal,
        window_left=window_size[0],
        window_right=window_size[1],
        logits_soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        chunk_size=chunk,
        **kept,
    )
    return out if lse is None else (out, lse)


def _written_for(k: Tensor, v: Tensor, k_cache: Tensor) -> AttentionSpec:
    """The attention that reads what is written; as many query heads as kv heads, since the queries are not
    known here."""
    return attention_spec(
        device=k.device,
        dtype=k.dtype,
        num_heads=k.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=k.shape[2],
        head_dim_v=v.shape[2],
        block_size=k_cache.shape[1],
        kv_dtype=k_cache.dtype,
    )


def _traced(x: Tensor, k_cache: Tensor, v: Tensor) -> tuple[Any, ...]:
    """In a trace, the first fields of `TracedAttention` for queries like ``x``, or for the keys ``x`` that
    are written, and values like ``v``; sizes are made constants."""
    sizes = (x.shape[1], k_cache.shape[2], x.shape[2], v.shape[-1], k_cache.shape[1])
    return (x.dtype, k_cache.dtype, *(operator.index(size) for size in sizes))


class _Handles:
    """A backend's handles as a dictionary's key: the same only if they are the same object."""

    def __init__(self, ops: BackendOps) -> None:
        self.ops = ops

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Handles) and other.ops is self.ops

    def __hash__(self) -> int:
        return id(self.ops)


@functools.lru_cache(maxsize=1024)
def _able(handles: _Handles, spec: AttentionSpec, registered: tuple[Any, ...]) -> Backend | None:
    """The backend of these handles, if one has them, and if it can run ``spec``. Runs once per kind of call
    and set of registered backends: a refusal is not kept."""
    backend = backend_of(handles.ops)
    reasons = [] if backend is None else backend.capabilities.reject(spec)
    if backend is not None and reasons:
        raise BackendUnavailableError(
            f"backend {backend.name!r} (its ops were given) cannot run this attention: {'; '.join(reasons)}"
        )
    return backend


class _OneCall(NamedTuple):
    """A batch to plan; see `torchpaged.backends.PlannedBatch`."""

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int


def _planned_once(
    backend: Backend, spec: AttentionSpec, batch: _OneCall, num_tokens: int, pool: Tensor
) -> Session:
    """A session for one call. The op is launched behind the plan, on the same stream, and its tensors are
    freed there."""
    num_reqs, width = batch.block_table.shape
    most_tokens = max(num_reqs * batch.max_query_len, num_tokens, 1)
    limits = Limits(max(num_reqs, 1), most_tokens, max(width, 1), pool.shape[0], pool.shape[1])
    session = backend.open([spec], limits, spec.device)
    session.plan(batch)
    return session


def merge_attn_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, ops: BackendOps | None = None
) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys (arXiv:2501.01005, section 2.2).

    Args:
        out_a, out_b: ``[num_tokens, num_heads, head_dim_v]``.
        lse_a, lse_b: ``[num_tokens, num_heads]`` float32, natural logarithm; -inf = that side saw no key and
            its ``out`` is not read. NaN or +inf on either side makes the row NaN: an LSE of +inf, with which
            some libraries mark empty rows, is none to us.
        ops: whose kernels to run; default: those of the backend that every other door would choose.

    Returns:
        ``(out, lse)`` of attention over both sets.

    Raises:
        ArgumentError: shapes, dtypes or devices don't fit.
        BackendUnavailableError: the backend that was asked for is not usable here; with all reasons.
    """
    if not torch.compiler.is_compiling():
        check_tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    if not torch.compiler.is_compiling():
        refuse_grad(out_a=out_a, out_b=out_b)
        check_merge_attn_states(out_a, lse_a, out_b, lse_b, out, lse)
        ops = choose_ops(out_a.device) if ops is None else ops
        check_native_dtype(ops.merge_attn_states, out_a=out_a)
    elif ops is None:
        ops = traced_ops(out_a.device)
    ops.merge_attn_states(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


def copy_blocks(
    k_cache: Tensor,
    v_cache: Tensor,
    block_mapping: Tensor | Sequence[tuple[int, int]],
    *,
    ops: BackendOps | None = None,
) -> None:
    """Copy whole blocks inside a pair of pools, in place.

    Args:
        k_cache, v_cache: the pools, as in `write_kv`.
        block_mapping: ``[num_pairs, 2]`` int64 of (source, destination), or a list of pairs; negative ids
            skip the pair. No block may be a destination twice, or source and destination.
        ops: whose kernels to run; default: those of the backend that every other door would choose.

    Raises:
        ArgumentError: an id is out of range, or destinations collide; nothing is copied then.
        BackendUnavailableError: the backend that was asked for is not usable here; with all reasons.
    """
    if not torch.compiler.is_compiling():
        check_tensors(k_cache=k_cache, v_cache=v_cache)
    if not isinstance(block_mapping, Tensor):
        host = torch.tensor(list(block_mapping), dtype=torch.int64).reshape(-1, 2)
        check_copy_blocks(k_cache, v_cache, host.to(k_cache.device))
        block_mapping = host.to(k_cache.device)
    elif not torch.compiler.is_compiling():
        check_copy_blocks(k_cache, v_cache, block_mapping)
    if ops is None:
        ops = traced_ops(k_cache.device) if torch.compiler.is_compiling() else choose_ops(k_cache.device)
    ops.copy_blocks(k_cache, v_cache, block_mapping)


def advance_step(
    sampled_token_ids: Tensor,
    block_table: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    ops: BackendOps | None = None,
) -> None:
    """Turn the buffers of one decode step into those of the next, in place and on the device.

    The step that ended may have been a prefill or a mixed one: a row's next token stands behind its
    ``seq_lens`` tokens, whatever was computed of them just now. `AttentionMetadata.decodes_after` makes the
    buffers of the step to come.

    Rows with seq_len 0 (padding) and rows whose table is full keep their values and get slot -1.

    Args:
        sampled_token_ids: ``[num_reqs]`` int64, the tokens just sampled.
        block_table: ``[num_reqs, max_blocks_per_req]`` int32; the next token's block must already be there.
        input_ids, positions, slot_mapping: ``[num_reqs]`` int64, rewritten.
        seq_lens: ``[num_reqs]`` int32, one longer afterwards.
        block_size: tokens per block.
        ops: whose kernels to run; default: those of the backend that every other door would choose.

    Raises:
        ArgumentError: shapes, dtypes or devices don't fit.
        BackendUnavailableError: the backend that was asked for is not usable here; with all reasons.
    """
    if not torch.compiler.is_compiling():
        check_tensors(
            sampled_token_ids=sampled_token_ids,
            block_table=block_table,
            input_ids=input_ids,
            positions=positions,
            seq_lens=seq_lens,
            slot_mapping=slot_mapping,
        )
        check_advance_step(
            sampled_token_ids,
            block_table,
            input_ids,
            positions,
            seq_lens,
            slot_mapping,
            block_size=block_size,
        )
        ops = choose_ops(seq_lens.device) if ops is None else ops
    elif ops is None:
        ops = traced_ops(seq_lens.device)
    ops.advance_step(
        sampled_token_ids, block_table, input_ids, positions, seq_lens, slot_mapping, block_size=block_size
    )
