"""Attention over the pools, `paged_attention`, and over two sets of keys: `merge_attn_states`."""

from collections.abc import Mapping
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from torchpaged.backends.choose.for_call import choose_ops, device_ops, planned_once, serving
from torchpaged.backends.choose.kind import Kind
from torchpaged.backends.session import Session
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.cascade_call import MergeCall
from torchpaged.custom_ops.attention.check import check_merge_attn_states, check_paged_attention
from torchpaged.custom_ops.attention.mask import BlockSparse
from torchpaged.custom_ops.checks import check_tensors, given, is_int, refuse_grad, switch
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError
from torchpaged.custom_ops.pools import FP8
from torchpaged.custom_ops.registry import check_native_dtype, checks_arguments
from torchpaged.functional.arguments import attention_call, run_op, scale_of_products


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
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    chunk_size: int | None = None,
    tree_mask: Tensor | None = None,
    block_sparse: BlockSparse | None = None,
    output_scale: Tensor | None = None,
    workspace: Mapping[str, Tensor] | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    ops: BackendOps | None = None,
) -> Any:
    """Attention of packed queries over paged keys and values: prefill, decode, chunked prefill and mixed
    batches alike.

    Query ``i`` of a request sees keys up to ``seq_len - query_len + i`` (bottom-right causal alignment).

    Args:
        q: ``[num_tokens, num_heads, head_dim]``, requests one after the other. Of float8_e4m3fn over pools of
            it: both products are then of 8 bits, the weights of the values included; see docs/ops_fp8.md for
            what that costs.
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``.
        v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim_v]``.
        block_table: ``[num_reqs, max_blocks_per_req]`` int32.
        seq_lens: ``[num_reqs]`` int32, this step's tokens included; 0 = padding row.
        query_start_loc: ``[num_reqs + 1]`` int32.
        max_query_len: upper bound of the query lengths.
        scale: softmax scale; default ``head_dim ** -0.5``.
        causal: hide keys after the query.
        window_size: ``(left, right)`` keys visible besides the own one; -1 = open.
        logits_soft_cap: scores become ``cap * tanh(score / cap)``; None or 0 = off.
        alibi_slopes: ``[num_heads]`` float32; the score of a key gets slope * (key position - query
            position), which is no penalty for keys behind the query.
        sinks: ``[num_heads]``, one logit per head that takes part in the softmax without a value.
        q_scale: float32 ``[1]`` or ``[num_kv_heads]``, for queries of fp8, what they were divided by. It is
            multiplied into ``k_scale`` at every call; for many calls pass the product as ``k_scale``.
        k_scale, v_scale: float32 ``[1]`` or ``[num_kv_heads]``, for fp8 pools.
        chunk_size: keys of the query's own chunk of that many positions only; None or 0 = off.
        tree_mask: ``[num_tokens]`` int64: of its request's query tokens a token sees itself and those before
            it whose bits its word has; needs ``causal`` and at most 64 query tokens per request. See
            `tree_mask_from_parents`. None: it sees all those before it.
        block_sparse: blocks of keys that each query sees besides those near it, by a pattern (vertical and
            slash): see `torchpaged.BlockSparse`. With ``causal`` and without a ``tree_mask``; a window or
            chunks hide keys besides.
        output_scale: float32, one number on the device. The result is then of float8_e4m3fn: attention over
            this scale, rounded and saturated; NaN stays NaN. For a projection behind it in fp8.
        workspace: what a session of the backend of ``ops`` keeps for this kind of call:
            ``session.workspace(spec)``; the session has planned the batch if it plans at all. None: nothing
            is kept: a GPU kernel makes its semaphore anew, which costs a memset, and a backend that plans
            plans for this call alone, which compiled code can't.
        batch_invariant: give each request the same bits in every batch: by a backend that
            declares it, in a session for this call alone; eager calls only, and without a ``workspace``. A
            `torchpaged.PagedAttention` of that option keeps its session, and may be compiled.
        return_lse: also return the log-sum-exp.
        out: ``[num_tokens, num_heads, head_dim_v]`` in q's dtype to write into, which is returned; apart from
            q and the pools, any strides with a contiguous last dimension. None: a new one. With queries of
            fp8 of bfloat16 or float16; None: a new one of bfloat16. With ``output_scale`` of float8_e4m3fn.
        ops: whose kernels to run; default: those of the backend that every other entry point would choose.

    Returns:
        A tensor ``[num_tokens, num_heads, head_dim_v]`` in q's or out's dtype; with ``return_lse`` a pair of
        it and float32 ``[num_tokens, num_heads]``.

    Raises:
        ArgumentError: shapes, dtypes, devices, strides, block ids, lengths or options don't fit.
        BackendUnavailableError: ``ops``, or the backend that was asked for, declare not to run this; with
            all reasons.
    """
    optional = given(
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        tree_mask=tree_mask,
        output_scale=output_scale,
    )
    _check_modes(ops, workspace, batch_invariant)
    if not torch.compiler.is_compiling():
        if not (is_int(max_query_len) or isinstance(max_query_len, torch.SymInt)):
            raise ArgumentError("max_query_len", "an int of at least 1", repr(max_query_len))
        switch("causal", causal)
        switch("return_lse", return_lse)
        batch = {"block_table": block_table, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
        further = {**optional, **given(q_scale=q_scale, out=out), **(workspace or {})}
        check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, **batch, **further)
        # of these the outputs take their shape
        for name, tensor, dims in (("q", q, 3), ("k_cache", k_cache, 4), ("v_cache", v_cache, 4)):
            if tensor.dim() != dims:
                raise ArgumentError(name, f"{dims} dimensions", str(list(tensor.shape)))
    if out is None:
        dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
        if output_scale is not None:
            dtype = torch.float8_e4m3fn
        out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3], dtype=dtype)
    if q_scale is not None:
        optional["k_scale"] = scale_of_products(q, q_scale, k_cache.shape[2], k_scale)
    refuse_grad(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, alibi_slopes=alibi_slopes)
    refuse_grad(output_scale=output_scale)
    call = attention_call(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32) if return_lse else None,
        max_query_len=max_query_len,
        scale=scale,
        causal=causal,
        window_size=window_size,
        logits_soft_cap=logits_soft_cap,
        chunk_size=chunk_size,
        block_sparse=block_sparse,
        semaphore=None if workspace is None else workspace.get("semaphore"),
        **optional,
    )
    _attend(call, Kind.of(call, batch_invariant), ops, workspace)
    return out if call.lse is None else (out, call.lse)


def _attend(
    call: AttentionCall, kind: Kind, ops: BackendOps | None, workspace: Mapping[str, Any] | None
) -> None:
    """Run a call by the backend that serves its kind."""
    if torch.compiler.is_compiling():
        handles, session = choose_ops(kind, ops, workspace is not None), None
    else:
        handles, session = _checked(call, kind, ops, workspace is None)
    if session is not None:  # which must live until the op has run
        workspace = session.workspace(session.specs[0])
    tensors, options = call.flat()
    handles.paged_attention(*tensors, **{**options, **(workspace or {})})


def _checked(
    call: AttentionCall, kind: Kind, ops: BackendOps | None, may_plan: bool
) -> tuple[BackendOps, Session | None]:
    """What serves an eager call, whose arguments are checked once: here, or by the op; and a session for it
    where its backend needs one and there ``may_plan``.

    Raises:
        ArgumentError: they don't fit; before any other reason.
        BackendUnavailableError: as `choose_ops`.
    """
    try:
        handles, backend, spec = serving(kind, ops)
    except (ArgumentError, BackendUnavailableError):
        check_paged_attention(call, call.fp8_queries)
        if ops is not None:
            check_native_dtype(ops.paged_attention, q=call.q, k_cache=call.k_cache)
        raise
    plans = kind.batch_invariant or (backend is not None and bool(backend.capabilities.planning))
    if plans or not checks_arguments(handles.paged_attention, call.q.device):
        check_paged_attention(call, call.fp8_queries)
        check_native_dtype(handles.paged_attention, q=call.q, k_cache=call.k_cache)
    if backend is None and kind.batch_invariant:
        raise BackendUnavailableError(
            "ops: handles of no backend that declares batch_invariant: a request's bits may depend "
            "on the others; leave ops out, or give those of one that does"
        )
    return handles, planned_once(backend, spec, call) if backend and plans and may_plan else None


def _check_modes(ops: Any, workspace: Any, batch_invariant: Any) -> None:
    """Whose kernels run with what, and whether batch invariance, which is a matter of what a backend's
    session keeps, may be asked here."""
    switch("batch_invariant", batch_invariant)
    if not isinstance(workspace, (Mapping, NoneType)):
        raise ArgumentError(
            "workspace", "tensors by argument name", type(workspace).__name__, "pass session.workspace(spec)"
        )
    if not isinstance(ops, (BackendOps, NoneType)):
        raise ArgumentError(
            "ops",
            "handles of a backend's ops",
            repr(ops),
            "pass BACKEND_OPS[name], or choose by use_backend(name)",
        )
    if batch_invariant and torch.compiler.is_compiling():
        raise ArgumentError(
            "batch_invariant",
            "False in a traced call, which can't open a session",
            "True",
            "use torchpaged.PagedAttention(batch_invariant=True), which keeps one",
        )
    if batch_invariant and workspace is not None:
        raise ArgumentError(
            "workspace",
            "None with batch_invariant=True: nothing tells whose spec a workspace is of",
            "a workspace",
            "leave batch_invariant out: open the session with attention_spec(batch_invariant=True)",
        )


def merge_attn_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    output_scale: Tensor | None = None,
    ops: BackendOps | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys (arXiv:2501.01005, section 2.2).

    >>> out, lse = torch.ones(1, 2, 4), torch.zeros(1, 2)
    >>> merge_attn_states(out, lse, 3 * out, lse)[0][0, 0].tolist()
    [2.0, 2.0, 2.0, 2.0]

    Args:
        out_a, out_b: ``[num_tokens, num_heads, head_dim_v]``.
        lse_a, lse_b: ``[num_tokens, num_heads]`` float32, natural logarithm; -inf = that side saw no key and
            its ``out`` is not read. NaN or +inf on either side makes the row NaN: an LSE of +inf, with which
            some libraries mark empty rows, is none to us.
        output_scale: float32, one number; the first result is then of float8_e4m3fn, as in
            `torchpaged.paged_attention`.
        ops: whose kernels to run; default: those of the backend that every other entry point would choose.

    Returns:
        ``(out, lse)`` of attention over both sets.

    Raises:
        ArgumentError: shapes, dtypes or devices don't fit.
        BackendUnavailableError: the backend that was asked for is not usable here; with all reasons.
    """
    read = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    read |= given(output_scale=output_scale)
    check_tensors(**read)
    dtype = out_a.dtype if output_scale is None else torch.float8_e4m3fn
    out, lse = torch.empty_like(out_a, dtype=dtype), torch.empty_like(lse_a)
    refuse_grad(**read)
    call = MergeCall(out_a, lse_a, out_b, lse_b, out, lse, output_scale)
    run_op(
        "merge_attn_states",
        partial(check_merge_attn_states, call),
        *call.flat(),
        lambda: device_ops(out_a.device) if ops is None else ops,
        native="out_a",
    )
    return out, lse
