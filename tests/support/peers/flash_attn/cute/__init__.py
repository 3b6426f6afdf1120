"""A stand-in for FlashAttention-4: its signature, the reference's numbers, NaN in rows that see nothing."""

from typing import Any

import torch
from signatures import takes

from torchpaged.custom_ops import BACKEND_OPS

CALLS: list[dict[str, Any]] = []


@takes(
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, "
    "num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
    "block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
    "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
    "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
)
def flash_attn_varlen_func(given):
    CALLS.append(vars(given))
    q, k, v, sinks = given.q, given.k, given.v, given.learnable_sink
    starts, lens, table = given.cu_seqlens_q, given.seqused_k, given.page_table
    assert given.cu_seqlens_k is None
    assert given.return_lse
    assert given.num_splits == 1
    assert lens.dtype == table.dtype == starts.dtype == torch.int32
    assert table.stride(-1) == 1
    assert int(lens.min()) >= 0
    assert int(table.max()) < len(k)
    assert isinstance(given.max_seqlen_q, int)
    assert given.max_seqlen_k == table.shape[1] * k.shape[1]
    assert sinks is None or sinks.shape == q.shape[1:2]
    left, right = (-1 if size is None else size for size in given.window_size)
    tokens, (total, heads) = int(starts[-1]), q.shape[:2]
    out = torch.full((total, heads, v.shape[-1]), float("nan"), dtype=q.dtype)
    lse = torch.full((heads, total), float("nan"))
    y, y_lse = out[:tokens].clone(), torch.empty(tokens, heads)
    BACKEND_OPS["reference"].paged_attention(
        *(q[:tokens], k, v, table, lens, starts, y, y_lse),
        max_query_len=given.max_seqlen_q,
        scale=given.softmax_scale,
        causal=given.causal,
        window_left=left,
        window_right=right,
        logits_soft_cap=given.softcap,
        sinks=sinks,
    )
    nothing = y_lse == float("-inf")
    out[:tokens] = y.masked_fill(nothing[..., None], float("nan"))
    lse[:, :tokens] = y_lse.masked_fill(nothing, float("nan")).T
    return out, lse
