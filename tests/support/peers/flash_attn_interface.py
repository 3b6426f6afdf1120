"""A stand-in for FlashAttention-3: the same signatures, the reference's numbers, and what the real one leaves
undefined as NaN. It refuses what the real one fails at: a schedule of another batch, or of other splits."""

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS

CALLS: list[dict[str, Any]] = []
SCHEDULES: list[dict[str, Any]] = []


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
    sinks=None,
):
    CALLS.append(dict(locals()))
    assert k is v is None
    assert cache_seqlens.dtype == page_table.dtype == cu_seqlens_q.dtype == torch.int32
    assert page_table.stride(-1) == 1
    assert int(cache_seqlens.min()) >= 0
    assert num_splits > 0
    assert scheduler_metadata is not None, "a schedule was planned"
    assert scheduler_metadata.tolist() == _schedule(cache_seqlens, cu_seqlens_q, num_splits).tolist()
    tokens, (total, heads) = int(cu_seqlens_q[-1]), q.shape[:2]
    out = torch.full((total, heads, v_cache.shape[-1]), float("nan"), dtype=q.dtype)
    lse = torch.full((heads, total), float("nan"))
    y, y_lse = out[:tokens].clone(), torch.empty(tokens, heads)
    BACKEND_OPS["reference"].paged_attention(
        q[:tokens],
        k_cache,
        v_cache,
        page_table,
        cache_seqlens,
        cu_seqlens_q,
        y,
        y_lse,
        max_query_len=max_seqlen_q,
        scale=softmax_scale,
        causal=causal,
        window_left=window_size[0],
        window_right=window_size[1],
        logits_soft_cap=softcap,
    )
    out[:tokens], lse[:, :tokens] = y, y_lse.T
    return (out, lse, None, None) if return_softmax_lse else out


def _schedule(cache_seqlens: Tensor, cu_seqlens_q: Tensor, num_splits: int) -> Tensor:
    return torch.cat([torch.tensor([num_splits + 1]), cache_seqlens + 1, cu_seqlens_q.diff()]).int()


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens,
    qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    cache_leftpad=None,
    page_size=None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    SCHEDULES.append(dict(locals()))
    assert len(cache_seqlens) == batch_size == len(cu_seqlens_q) - 1
    assert max_seqlen_k % page_size == 0
    return _schedule(cache_seqlens, cu_seqlens_q, num_splits)
