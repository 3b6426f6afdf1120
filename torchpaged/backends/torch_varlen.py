"""The ``torch_varlen`` backend: torch's own ``varlen_attn`` with a block table, from torch 2.12 on.

torch runs FlashAttention-3 or -4 behind it, whichever was activated before::

    torch.nn.attention.activate_flash_attention_impl("FA3")     # its package must be installed

Graph support is declared as NEVER: host numbers of the first call stay in a captured graph, and no GPU with
such a torch has proved otherwise here. Its log-sum-exp is documented in another layout than its kernels
return, so that neither it nor sinks, which need it, are offered.
"""

from functools import partial
from typing import Any

import torch

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities, further_reasons
from torchpaged.backends.features import COMMON_FEATURES
from torchpaged.backends.library_op import attention_op
from torchpaged.backends.package import parameters_lacking
from torchpaged.backends.planned_batch import blocks_in_use, finish, hidden_queries
from torchpaged.backends.spec import GraphSupport
from torchpaged.custom_ops.attention.call import AttentionCall

_DTYPES = (torch.bfloat16, torch.float16)


def _attend(call: AttentionCall) -> None:
    from torch.nn.attention.varlen import varlen_attn

    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out = call[:7]
    block_size, right = k_cache.shape[1], 0 if call.causal else call.window_right
    y: Any = varlen_attn(
        q,
        k_cache,
        v_cache,
        query_start_loc,
        None,
        call.max_query_len,
        block_table.shape[1] * block_size,
        scale=call.scale,
        window_size=(call.window_left, right),
        enable_gqa=q.shape[1] != k_cache.shape[2],
        seqused_k=seq_lens.clamp_min(0),
        block_table=blocks_in_use(block_table, seq_lens, block_size),
    )
    finish(hidden_queries(seq_lens, query_start_loc, len(q)), out, None, y, None)


def unavailable() -> str | None:
    """Why torch's function can't be used here, or None."""
    too_old = f"torch {torch.__version__} has no varlen_attn with a block table; pip install 'torch>=2.12'"
    try:
        from torch.nn.attention import current_flash_attention_impl
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return too_old
    if parameters_lacking(varlen_attn, ("block_table", "seqused_k")):
        return too_old
    if current_flash_attention_impl() is None:
        return (
            "torch's own FlashAttention-2 takes no block table; install FlashAttention-3 and call "
            "torch.nn.attention.activate_flash_attention_impl('FA3')"
        )
    return None if torch.cuda.is_available() else "no CUDA device is visible"


CAPABILITIES = Capabilities(
    device_types=("cuda",),
    dtypes=_DTYPES,
    kv_dtypes=_DTYPES,
    graph_support=GraphSupport.NEVER,
    min_compute_capability=(9, 0),
    max_head_dim=256,
    different_head_dim_v=False,
    features=COMMON_FEATURES - {"logits_soft_cap", "alibi", "sinks", "chunked", "lse"},
    further=partial(further_reasons, width=8),
)
BACKEND = Backend(
    name="torch_varlen",
    capabilities=CAPABILITIES,
    ops=attention_op("torchpaged_varlen", _attend, CAPABILITIES, "torch_varlen"),
    unavailable=unavailable,
)
