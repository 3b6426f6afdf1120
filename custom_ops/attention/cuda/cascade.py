"""Shared prefixes on Hopper: the prefixes' tiles on most multiprocessors, the suffixes' decode launch on the
others from the beginning and on all at the end, and one merge of both (prefill_shares.cuh,
prefill_suffixes.cuh)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.cuda import paged_attention, prefill
from torchpaged.custom_ops.cuda import gpu

#: Multiprocessors of the decode launch alone while the prefixes' tiles run.
LEFT_FOR_SUFFIXES = 14
#: Tiles for each CTA of the prefixes at most, by shapes: so many shares of one have room.
MOST_TILES_PER_CTA = prefill.TURNS - 2


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
    ctas: int = 0,
) -> None:
    """Launch on checked arguments that `refuse` lets pass. ``ctas``: for the prefixes; 0: all but
    `LEFT_FOR_SUFFIXES`."""
    num_reqs, num_kv_heads, index = block_table.shape[0], k_cache.shape[2], q.device.index or 0
    semaphore = torch.zeros(num_reqs * num_kv_heads, dtype=torch.int32, device=q.device)
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
        q.index_select(0, order),
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
        suffixes=prefill.Suffixes(order, own_lse, ctas or gpu.num_sms(index) - LEFT_FOR_SUFFIXES),
    )
