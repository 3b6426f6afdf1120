"""A stand-in for FlashAttention-3: the same signatures, the reference's numbers, and what the real one leaves
undefined as NaN. It refuses what the real one fails at: a schedule of another batch, or of other splits."""

from typing import Any

import torch
from signatures import takes
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS

CALLS: list[dict[str, Any]] = []
SCHEDULES: list[dict[str, Any]] = []


@takes(
    "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, "
    "softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
    "return_softmax_lse=False, sinks=None"
)
def flash_attn_with_kvcache(given):
    CALLS.append(vars(given))
    q, starts, lens, table = given.q, given.cu_seqlens_q, given.cache_seqlens, given.page_table
    assert given.k is given.v is None
    assert lens.dtype == table.dtype == starts.dtype == torch.int32
    assert table.stride(-1) == 1
    assert int(lens.min()) >= 0
    assert given.num_splits > 0
    assert given.scheduler_metadata is not None, "a schedule was planned"
    assert given.scheduler_metadata.tolist() == _schedule(lens, starts, given.num_splits).tolist()
    tokens, (total, heads) = int(starts[-1]), q.shape[:2]
    out = torch.full((total, heads, given.v_cache.shape[-1]), float("nan"), dtype=q.dtype)
    lse = torch.full((heads, total), float("nan"))
    y, y_lse = out[:tokens].clone(), torch.empty(tokens, heads)
    tensors = (q[:tokens], given.k_cache, given.v_cache, table, lens, starts, y, y_lse)
    BACKEND_OPS["reference"].paged_attention(
        *tensors,
        max_query_len=given.max_seqlen_q,
        scale=given.softmax_scale,
        causal=given.causal,
        window_left=given.window_size[0],
        window_right=given.window_size[1],
        logits_soft_cap=given.softcap,
    )
    out[:tokens], lse[:, :tokens] = y, y_lse.T
    return (out, lse, None, None) if given.return_softmax_lse else out


def _schedule(cache_seqlens: Tensor, cu_seqlens_q: Tensor, num_splits: int) -> Tensor:
    return torch.cat([torch.tensor([num_splits + 1]), cache_seqlens + 1, cu_seqlens_q.diff()]).int()


@takes(
    "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
    "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
    "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
    "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"
)
def get_scheduler_metadata(given):
    SCHEDULES.append(vars(given))
    assert len(given.cache_seqlens) == given.batch_size == len(given.cu_seqlens_q) - 1
    assert given.max_seqlen_k % given.page_size == 0
    return _schedule(given.cache_seqlens, given.cu_seqlens_q, given.num_splits)
