"""cascade_attention of the ``cuda`` backend. On Hopper three launches: the prefixes' tiles on most
multiprocessors, the suffixes' decode on the others from the beginning and on all at the end, and one merge of
both (prefill_shares.cuh, prefill_suffixes.cuh). Everything they can't take: two calls of its attention, and
Triton's merge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import variables
from torchpaged.custom_ops.attention.check import check_cascade_attention
from torchpaged.custom_ops.attention.cuda import paged_attention, prefill
from torchpaged.custom_ops.attention.triton.cascade_attention import compose
from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.errors import BackendUnavailableError

#: Tiles for each CTA of the prefixes at most, by shapes: so many shares of one have room.
MOST_TILES_PER_CTA = prefill.TURNS - 2


def cascade_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    prefix_block_table: Tensor,
    prefix_lens: Tensor,
    prefix_query_start_loc: Tensor,
    order: Tensor,
    inverse: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    max_query_len: int,
    scale: float,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    semaphore: Tensor | None = None,
) -> None:
    """Launch; arguments as in ``custom_ops/attention/schema.py``. Every choice here depends on shapes, never
    on lengths."""
    if q.device.type != "cuda":
        raise BackendUnavailableError(
            f"backend 'cuda': its kernels run on an NVIDIA GPU, got tensors on {q.device.type}"
        )
    own, prefixes = (
        (block_table, seq_lens, query_start_loc),
        (prefix_block_table, prefix_lens, prefix_query_start_loc),
    )
    options: dict[str, Any] = {
        "max_query_len": max_query_len,
        "scale": scale,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "semaphore": semaphore,
    }
    check_cascade_attention(q, k_cache, v_cache, *own, *prefixes, order, inverse, out, lse, **options)
    if refuse(q, k_cache, v_cache, block_table, prefix_block_table, out, max_query_len, scale, sinks) is None:
        attend(q, k_cache, v_cache, *own, *prefixes, order, out, lse, **options)
        return
    ops = torch.ops.torchpaged
    handles = ops.paged_attention.cuda, ops.merge_attn_states.triton
    compose(*handles, q, (k_cache, v_cache), own, prefixes, (order, inverse), out, lse, **options)


def refuse(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    prefix_block_table: Tensor,
    out: Tensor,
    max_query_len: int,
    scale: float,
    sinks: Tensor | None,
) -> str | None:
    """Why the three launches can't take a call with these tensors, or None. Shapes, dtypes, strides and
    addresses only."""
    num_tokens, num_reqs, num_groups = q.shape[0], block_table.shape[0], prefix_block_table.shape[0]
    if not (num_tokens and num_reqs and num_groups and prefix_block_table.shape[1]):
        return "no tokens, requests, groups or blocks"
    capacity = block_table.shape[1] * k_cache.shape[1]
    own = paged_attention.route(q, k_cache, v_cache, out, num_reqs, max_query_len, scale, sinks, capacity)
    if own.kernel != "decode":
        return f"suffixes: {own.reason or own.kernel}"
    if not variables.get("TORCHPAGED_CUDA_PREFILL"):
        return "prefixes: TORCHPAGED_CUDA_PREFILL=0"
    reason = prefill.why_not(q, k_cache, v_cache, out, scale=scale, sinks=None)
    if reason is not None:
        return f"prefixes: {reason}"
    num_kv_heads = k_cache.shape[2]
    group = q.shape[1] // num_kv_heads
    if group * prefill.square_width(q.shape[2]) % 64:
        return f"prefixes: {group} query heads per kv head of width {q.shape[2]}"
    # as cut with a soft cap: tiles of at most as many rows; not in pairs
    dim, dim_v = k_cache.shape[3], v_cache.shape[3]
    rows = prefill.shape_for(dim, dim_v, k_cache.dtype, k_cache.shape[1], plain=False).rows
    tiles = prefill.most_tiles(num_tokens, num_groups, rows // group) * num_kv_heads
    most = MOST_TILES_PER_CTA * prefix_ctas(gpu.num_sms(q.device.index or 0))
    return None if tiles <= most else f"prefixes: at most {tiles} tiles by shapes, {most} have room"


def prefix_ctas(num_sms: int) -> int:
    """CTAs of the prefixes' launch, a multiprocessor each: 108 of 132. While they run the others are the
    decode launch's alone. Any number is right (docs/log/shared_prefixes.md)."""
    return max(num_sms * 9 // 11, 1)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    prefix_block_table: Tensor,
    prefix_lens: Tensor,
    prefix_query_start_loc: Tensor,
    order: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    max_query_len: int,
    scale: float,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    semaphore: Tensor | None = None,
    ctas: int = 0,
    paired: bool = False,
) -> None:
    """The three launches, on checked arguments that `refuse` lets pass. ``ctas``: for the prefixes; 0:
    `prefix_ctas`. ``paired``: as in `prefill.Suffixes`, where `prefill.may_pair` says that they
    can; off, since no win was shown (docs/log/shared_prefixes.md)."""
    ctas = ctas or prefix_ctas(gpu.num_sms(q.device.index or 0))
    if semaphore is None:
        count = block_table.shape[0] * k_cache.shape[2]
        semaphore = torch.zeros(count, dtype=torch.int32, device=q.device)
    own_lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    def decodes() -> tuple[Callable[[], None], int]:
        return paged_attention.prepare_decode(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            query_start_loc,
            out,
            own_lse,
            max_query_len,
            scale,
            True,
            -1,
            -1,
            logits_soft_cap,
            None,
            sinks,
            k_scale,
            v_scale,
            0,
            semaphore,
            longest=max_query_len,
        )

    prefill.prefill(
        q,
        k_cache,
        v_cache,
        prefix_block_table,
        prefix_lens,
        prefix_query_start_loc,
        out,
        lse,
        scale,
        False,
        semaphore,
        soft_cap=logits_soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        behind=decodes,
        suffixes=prefill.Suffixes(order, own_lse, ctas // 2 * 2 if paired else ctas, paired),
    )
