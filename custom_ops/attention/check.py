"""Argument checks of ``paged_attention``, ``merge_attn_states`` and ``cascade_attention``, shared by
reference, kernels and public functions; pieces: checks.py, pools.py and batch_values.py."""

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.cascade_call import CascadeCall, MergeCall
from torchpaged.custom_ops.attention.mask import BlockSparse
from torchpaged.custom_ops.batch_values import check_batch, check_batch_values, check_results, check_starts
from torchpaged.custom_ops.checks import (
    check_device,
    check_dims,
    check_dtype,
    check_last_dim,
    check_softmax,
    check_tensor,
    given,
    is_int,
    reads_values,
    shape_of,
)
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.memory import check_apart, check_own_elements
from torchpaged.custom_ops.pools import FLOATS, FP8, check_cache_dtype, check_pools, check_scale

#: Query tokens of a request that the words of a tree_mask have bits for.
MAX_TREE_TOKENS = 64
#: Largest number of a `BlockSparse`: kernels multiply and add them in 32 bits.
MAX_BLOCK_SPARSE = 1 << 20


def _check_semaphore(semaphore: Tensor, least: int, device: torch.device) -> None:
    check_tensor("semaphore", semaphore, (None,), torch.int32)
    check_device(device, semaphore=semaphore)
    if semaphore.shape[0] < least:
        raise ArgumentError(
            "semaphore", f"at least num_reqs * num_kv_heads = {least} numbers", shape_of(semaphore)
        )
    if reads_values(device) and bool(semaphore.any()):
        raise ArgumentError(
            "semaphore",
            "zeros",
            "other values",
            "allocate with torch.zeros; calls that may overlap need one each",
        )


def check_paged_attention(call: AttentionCall, fp8_queries: bool = False) -> None:
    """Every argument of ``paged_attention``; raises `ArgumentError` before anything is written.

    ``fp8_queries``: whether the caller's backend takes queries of e4m3 over pools of e4m3.
    """
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out, lse = call[:8]
    check_pools(k_cache, v_cache)
    num_kv_heads = k_cache.shape[2]
    check_dims("q", q, None, None, k_cache.shape[3])
    if q.shape[1] == 0 or q.shape[1] % num_kv_heads:
        raise ArgumentError(
            "q", f"num_heads a multiple of num_kv_heads ({num_kv_heads})", f"{q.shape[1]} heads"
        )
    check_dims("out", out, q.shape[0], q.shape[1], v_cache.shape[3])
    _check_query_dtype(q, k_cache, fp8_queries)
    _check_results_dtype(call)
    batch = check_batch(block_table, seq_lens, query_start_loc, call.max_query_len)
    check_last_dim(q=q, out=out)
    check_results(q, out, lse, k_cache=k_cache, v_cache=v_cache, **given(output_scale=call.output_scale))
    if call.alibi_slopes is not None:
        check_tensor("alibi_slopes", call.alibi_slopes, q.shape[1:2], torch.float32)
    if call.sinks is not None:
        check_tensor("sinks", call.sinks, q.shape[1:2], *FLOATS)
    check_device(
        q.device,
        k_cache=k_cache,
        out=out,
        lse=lse,
        alibi_slopes=call.alibi_slopes,
        sinks=call.sinks,
        output_scale=call.output_scale,
        **call.scales.by_name,
        **batch,
    )
    check_cache_dtype(q, k_cache, call.scales)
    _check_numbers(call)
    if call.semaphore is not None:
        _check_semaphore(call.semaphore, block_table.shape[0] * num_kv_heads, q.device)
    if call.tree_mask is not None:
        _check_per_token(call.per_token, q)
        _check_tree_mask(call.causal, call.max_query_len)
    if reads_values(q.device):
        check_batch_values(
            q.shape[0],
            k_cache,
            block_table,
            seq_lens,
            query_start_loc,
            call.max_query_len,
            call.window_left,
            call.chunk_size,
        )
        if call.tree_mask is not None:
            _check_tree_values(call.tree_mask, seq_lens, query_start_loc)


def _check_numbers(call: AttentionCall) -> None:
    check_softmax(call.scale, call.logits_soft_cap)
    for name, size in (("window_left", call.window_left), ("window_right", call.window_right)):
        if size < -1:
            raise ArgumentError(name, "-1 (open) or a number of keys >= 0", str(size))
    if call.chunk_size < 0:
        raise ArgumentError("chunk_size", "0 (off) or a positive number of tokens", str(call.chunk_size))
    check_block_sparse(call.block_sparse, call.causal, call.tree_mask is not None)


def check_block_sparse(pattern: object, causal: bool = True, tree_mask: bool = False) -> None:
    """The numbers of a `BlockSparse`, or None, and the masks that it goes with; raises `ArgumentError`."""
    if pattern is None:
        return
    if not causal or tree_mask:
        name, expected, got = ("tree_mask", "none", "one") if causal else ("causal", "True", "False")
        raise ArgumentError(name, f"{expected} with block_sparse", got, "leave block_sparse out")
    if not isinstance(pattern, BlockSparse) or not all(is_int(number) for number in pattern):
        raise ArgumentError("block_sparse", "a torchpaged.BlockSparse of ints, or None", repr(pattern))
    least = BlockSparse(1, 1, 1, 0, 0, 1)
    for name, number, smallest in zip(BlockSparse._fields, pattern, least, strict=True):
        if not smallest <= number <= MAX_BLOCK_SPARSE:
            raise ArgumentError(
                "block_sparse", f"{name} in [{smallest}, {MAX_BLOCK_SPARSE}]", f"{name}={number}"
            )


def _check_results_dtype(call: AttentionCall) -> None:
    if call.output_scale is None:
        check_dtype("out", call.out, *(FLOATS if call.fp8_queries else (call.q.dtype,)))
        return
    check_dtype("out", call.out, torch.float8_e4m3fn)
    check_scale("output_scale", call.output_scale, 1)


def _check_query_dtype(q: Tensor, k_cache: Tensor, fp8_queries: bool) -> None:
    if q.dtype not in FP8:
        return
    if not fp8_queries:
        raise ArgumentError(
            "q",
            "a floating point dtype of 16, 32 or 64 bits",
            str(q.dtype),
            "choose a backend that declares fp8_queries (torchpaged backends), or convert them",
        )
    for name, tensor in (("q", q), ("k_cache", k_cache)):
        if tensor.dtype != torch.float8_e4m3fn:
            raise ArgumentError(name, "float8_e4m3fn, as fp8 queries and their keys are", str(tensor.dtype))


def _check_per_token(tensors: dict[str, Tensor], q: Tensor) -> None:
    for name, tensor in tensors.items():
        check_tensor(name, tensor, q.shape[:1], torch.int64)
    check_device(q.device, **tensors)


def _check_tree_mask(causal: bool, max_query_len: int) -> None:
    if not causal:
        raise ArgumentError(
            "causal", "True with a tree_mask: no query token sees a later one of its request", "False"
        )
    if max_query_len > MAX_TREE_TOKENS:
        raise ArgumentError(
            "max_query_len",
            f"at most {MAX_TREE_TOKENS} with a tree_mask, which has a bit for each query token of a request",
            str(max_query_len),
            "attend to longer queries in a call of their own",
        )


def _check_tree_values(tree_mask: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> None:
    query_lens = query_start_loc.diff()
    short = (seq_lens > 0) & (seq_lens < query_lens)
    if bool(short.any()):
        row = int(short.nonzero()[0])
        raise ArgumentError(
            "seq_lens",
            f"at least the query length ({int(query_lens[row])}) with a tree_mask, or 0 for a padding row",
            f"{int(seq_lens[row])} in row {row}",
        )
    used = int(query_start_loc[-1])
    token = torch.arange(used, device=tree_mask.device)
    index = token - torch.repeat_interleave(query_start_loc[:-1].long(), query_lens.long())
    # arithmetic shifts: of token 63 nothing is left but the sign, which is its own bit
    later = (tree_mask[:used] >> index >> 1) * (index < MAX_TREE_TOKENS - 1)
    if bool(later.any()):
        at = int(later.nonzero()[0])
        raise ArgumentError(
            "tree_mask",
            "bits of the token itself and of tokens before it in its request",
            f"a bit of a later one in row {at}, its request's query token {int(index[at])}",
            "give parents smaller numbers than their children",
        )


def check_merge_attn_states(call: MergeCall) -> None:
    """Every argument of ``merge_attn_states``."""
    out_a, lse_a, out_b, lse_b, out, lse, output_scale = call
    if out_a.dim() != 3:
        raise ArgumentError("out_a", "shape [num_tokens, num_heads, head_dim]", shape_of(out_a))
    if min(out_a.shape[1:]) < 1:
        raise ArgumentError("out_a", "at least one head and one column", shape_of(out_a))
    check_dtype("out_a", out_a, *FLOATS)
    results = out_a.dtype if output_scale is None else torch.float8_e4m3fn
    for name, tensor, dtype in (("out_b", out_b, out_a.dtype), ("out", out, results)):
        check_dims(name, tensor, *out_a.shape)
        check_dtype(name, tensor, dtype)
    if output_scale is not None:
        check_scale("output_scale", output_scale, 1)
        written = {"out": out, **given(lse=lse)}
        check_apart(written, {"output_scale": output_scale}, "give it memory of its own")
    for name, state in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if state is not None:
            check_dims(name, state, *out_a.shape[:2])
            check_dtype(name, state, torch.float32)
    further = given(lse=lse, output_scale=output_scale)
    check_device(out_a.device, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, **further)
    check_last_dim(out_a=out_a, out_b=out_b, out=out)
    check_own_elements("out", out)
    if lse is not None:
        check_own_elements("lse", lse)


def check_cascade_attention(call: CascadeCall) -> None:
    """Every argument of ``cascade_attention``; raises `ArgumentError` before anything is written."""
    own, prefix_block_table, prefix_lens, prefix_query_start_loc, order, inverse = call
    check_paged_attention(own)
    q = own.q
    groups = {
        "prefix_block_table": prefix_block_table,
        "prefix_lens": prefix_lens,
        "prefix_query_start_loc": prefix_query_start_loc,
    }
    check_tensor("prefix_block_table", prefix_block_table, (None, None), torch.int32)
    num_groups = prefix_block_table.shape[0]
    check_tensor("prefix_lens", prefix_lens, (num_groups,), torch.int32)
    check_tensor("prefix_query_start_loc", prefix_query_start_loc, (num_groups + 1,), torch.int32)
    check_device(q.device, **groups)
    _check_per_token(call.per_token, q)
    if reads_values(q.device):
        _check_values(q, own.k_cache, groups, order, inverse, own.query_start_loc)


def _check_values(
    q: Tensor,
    k_cache: Tensor,
    groups: dict[str, Tensor],
    order: Tensor,
    inverse: Tensor,
    query_start_loc: Tensor,
) -> None:
    table, lens, starts = groups.values()
    num_blocks, block_size = k_cache.shape[:2]
    rows = torch.arange(q.shape[0], device=q.device)
    if not torch.equal(order.sort().values, rows):
        raise ArgumentError("order", f"each of {q.shape[0]} token rows once", str(order.tolist()[:64]))
    if not torch.equal(inverse[order], rows):
        raise ArgumentError("inverse", "the place of each row in order", str(inverse.tolist()[:64]))
    check_starts("prefix_query_start_loc", starts, q.shape[0])
    counts = starts.diff()
    longest = table.shape[1] * block_size
    if bool(((lens < 0) | (lens % block_size != 0) | (lens > longest) | (counts > lens)).any()):
        raise ArgumentError(
            "prefix_lens",
            f"multiples of {block_size} up to {longest}, and no fewer than the tokens of the group",
            f"{lens.tolist()[:64]} with {counts.tolist()[:64]} tokens",
        )
    used = torch.arange(table.shape[1], device=q.device) * block_size < lens[:, None]
    bad = ((table < 0) | (table >= num_blocks)) & used
    if bool(bad.any()):
        at, column = (int(x) for x in bad.nonzero()[0])
        raise ArgumentError(
            "prefix_block_table",
            f"block ids in [0, {num_blocks})",
            f"{int(table[at, column])} in group {at}, column {column}",
        )
    group = group_of_rows(inverse, starts)
    first = query_start_loc[:-1].long()
    request = torch.searchsorted(query_start_loc[1:].long(), rows, right=True)
    inside = request < first.shape[0]
    if bool((group[inside] != group[first[request[inside]]]).any()):
        raise ArgumentError(
            "order", "all token rows of a request in one group, or in none", "a request in two"
        )
    if bool((group[~inside] < starts.shape[0] - 1).any()):
        raise ArgumentError("order", "no rows of padding in a group", "some")


def group_of_rows(inverse: Tensor, prefix_query_start_loc: Tensor) -> Tensor:
    """``[T]`` int64: each token row's group; as many as there are groups: none."""
    return torch.searchsorted(prefix_query_start_loc[1:].long(), inverse, right=True)


def check_options(
    scale: float | None, window_size: object, logits_soft_cap: float | None, chunk_size: Any
) -> tuple[int, int]:
    """The options of attention as a public function or a module takes them; returns the window's
    two sides."""
    sides = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or any(not is_int(side) or side < -1 for side in sides):
        raise ArgumentError(
            "window_size", "a pair (left, right) of ints, numbers of keys or -1 (open)", repr(window_size)
        )
    check_softmax(1 if scale is None else scale, 0 if logits_soft_cap is None else logits_soft_cap)
    if chunk_size is not None and (not is_int(chunk_size) or chunk_size < 0):
        raise ArgumentError("chunk_size", "None or 0 (off), or a positive number of tokens", repr(chunk_size))
    return int(sides[0]), int(sides[1])
