"""paged_attention: chooses between the decode and the prefill kernel by shapes and launches it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.check import check_paged_attention
from torchpaged.custom_ops.attention.triton import config
from torchpaged.custom_ops.triton import launching
from torchpaged.custom_ops.triton.compile_together import Launch, compile_together
from torchpaged.custom_ops.triton.kernel_store import KernelRef

_PREFILL = KernelRef(
    "attention.triton.prefill",
    "prefill_kernel",
    constants=frozenset({22, 23, 25, 26}),
    unspecialised=frozenset({15, 16, 18, 19}),
)
_DECODE = KernelRef("attention.triton.decode", "decode_kernel", unspecialised=frozenset({18, 19, 26}))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    max_query_len: int,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    chunk_size: int = 0,
    tree_mask: Tensor | None = None,
    semaphore: Tensor | None = None,
) -> None:
    """Launch; arguments as in ``custom_ops/attention/schema.py``. Every choice here depends on shapes, never
    on lengths."""
    launching.require_launchable(q)
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
        window_left=window_left,
        window_right=window_right,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        chunk_size=chunk_size,
        tree_mask=tree_mask,
        semaphore=semaphore,
    )
    if max_query_len == 1:  # a query token that is alone in its request sees itself, whatever its word says
        tree_mask = None
    launching.require_fp8(k_cache)
    num_tokens, num_heads, dim = q.shape
    num_reqs, (block_size, num_kv_heads, dim_v) = (
        block_table.shape[0],
        (k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]),
    )
    if not num_reqs:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    if not num_tokens:
        return
    if (k_scale is None) != (v_scale is None):  # one flag serves both
        one = torch.ones(1, dtype=torch.float32, device=q.device)
        k_scale, v_scale = one if k_scale is None else k_scale, one if v_scale is None else v_scale
    capacity = block_table.shape[1] * block_size
    window_left, window_right, chunk_size = config.bounded_masks(
        window_left, window_right, chunk_size, capacity
    )
    group = num_heads // num_kv_heads
    tensors = (
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        lse,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        tree_mask,
    )
    out_strides = (*out.stride()[:2], *(lse.stride() if lse is not None else (0, 0)))
    strides = (
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *out_strides,
        block_table.stride(0),
        _head_stride(k_scale),
        _head_stride(v_scale),
    )
    dim_pad, dim_v_pad = config.padded_widths(dim, dim_v, k_cache.element_size())
    flags: dict[str, Any] = {
        "GROUP": group,
        "DIM": dim,
        "DIM_PAD": dim_pad,
        "DIM_V": dim_v,
        "DIM_V_PAD": dim_v_pad,
        "BLOCK_SIZE": block_size,
        "CAUSAL": causal,
        "WINDOW_LEFT": window_left,
        "WINDOW_RIGHT": window_right,
        "CHUNK": chunk_size,
        "SOFT_CAP": logits_soft_cap > 0,
        "ALIBI": alibi_slopes is not None,
        "SINKS": sinks is not None,
        "KV_SCALES": k_scale is not None,
        "HAS_LSE": lse is not None,
        "TREE": tree_mask is not None,
        "INTERPRET": launching.INTERPRET,
    }
    if max_query_len <= config.MAX_DECODE_QUERY_LEN and max_query_len * group <= config.MAX_DECODE_ROWS:
        _decode(
            tensors,
            strides,
            flags,
            semaphore,
            max_query_len,
            num_reqs,
            num_tokens,
            num_kv_heads,
            scale,
            logits_soft_cap,
        )()
        return
    skip, decode = config.decode_len_in_mixed(group, num_reqs, num_tokens, max_query_len), None
    if skip:  # prepared ahead: the launch must follow that of the other queries with no kernel between them
        decode = _decode(
            tensors,
            strides,
            flags,
            semaphore,
            skip,
            num_reqs,
            num_tokens,
            num_kv_heads,
            scale,
            logits_soft_cap,
            skip,
        )
    tiles = config.prefill_tiles(
        max(dim, dim_v),
        group,
        q.element_size(),
        max_query_len,
        capacity,
        config.has_large_tiles(q.device),
        flags["TREE"] and (flags["WINDOW_LEFT"] >= 0 or flags["CHUNK"] > 0 or flags["ALIBI"]),
    )
    tokens = tiles.rows // group
    if skip:
        single, shared = config.programs_for_longer(num_reqs, num_tokens, skip, tokens)
    else:
        single, shared = num_tokens // tokens + num_reqs, 0
    arguments = (
        *tensors,
        scale,
        logits_soft_cap,
        num_reqs,
        num_tokens,
        num_kv_heads,
        single,
        launching.num_sms(q.device),
        *strides,
    )
    options = dict(
        TOKENS=tokens,
        TILE_M=tiles.rows,
        TILE_KV=tiles.keys,
        SKIP_DECODES=skip,
        **flags,
        **launching.early_launch(q.device),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    prefill = Launch(_PREFILL, ((single + shared) * num_kv_heads,), arguments, options)
    if decode is not None:
        key = (
            q.device,
            q.dtype,
            k_cache.dtype,
            num_heads,
            *flags.values(),
            tiles,
            skip,
            k_cache.stride(),
            v_cache.stride(),
        )
        compile_together(key, q.device, prefill, decode)
    prefill()
    if decode is not None:
        decode()


def _head_stride(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(-1)


def _decode(
    tensors: tuple[Tensor | None, ...],
    strides: tuple[int, ...],
    flags: dict[str, Any],
    semaphore: Tensor | None,
    max_query_len: int,
    num_reqs: int,
    num_tokens: int,
    num_kv_heads: int,
    scale: float,
    soft_cap: float,
    longest: int = 0,
) -> Launch:
    """What launches the decode kernel; every allocation is made here, ahead of the launch."""
    q, k_cache = tensors[0], tensors[1]
    assert q is not None and k_cache is not None
    query_len = launching.next_power_of_2(max_query_len)
    rows = launching.next_power_of_2(query_len * flags["GROUP"])
    tiles = config.decode_tiles(
        max(flags["DIM"], flags["DIM_V"]), rows, k_cache.element_size(), q.element_size()
    )
    programs = config.num_programs(q.device, tiles)
    if semaphore is None:
        semaphore = torch.zeros(num_reqs * num_kv_heads, dtype=torch.int32, device=q.device)
    part_acc = torch.empty(programs * 2 * rows * flags["DIM_V_PAD"], dtype=torch.float32, device=q.device)
    part_state = torch.empty(programs * 4 * rows, dtype=torch.float32, device=q.device)
    reqs = next((size for size in config.SCANS if num_reqs <= size), config.SCANS[-1])
    k_block, k_slot, k_head, v_block, v_slot, v_head = strides[2:8]
    arguments = (
        *tensors,
        part_acc,
        part_state,
        semaphore,
        scale,
        soft_cap,
        num_reqs,
        num_tokens,
        *strides[:2],
        *strides[8:],
    )
    options = dict(
        K_BLOCK=k_block,
        K_SLOT=k_slot,
        K_HEAD=k_head,
        V_BLOCK=v_block,
        V_SLOT=v_slot,
        V_HEAD=v_head,
        NUM_KV_HEADS=num_kv_heads,
        QUERY_LEN=query_len,
        TILE_M=tiles.rows,
        TILE_KV=tiles.keys,
        SLICES=tiles.slices,
        REQS=reqs,
        ONE_SCAN=num_reqs <= reqs,
        MIN_TILES=tiles.min_tiles,
        ROWS=rows,
        PARTS=config.merged_parts(flags["DIM_V"]),
        PDL=launching.launches_early(q.device),
        LONGEST=longest,
        **flags,
        **config.decode_options(q.device, tiles),
    )
    return Launch(_DECODE, (programs,), arguments, options)
