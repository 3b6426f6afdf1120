"""The ``torch_varlen`` backend: torch's own ``varlen_attn`` with a block table, from torch 2.12 on.

torch runs FlashAttention-3 or -4 behind it, whichever was activated before::

    torch.nn.attention.activate_flash_attention_impl("FA3")     # its package must be installed

Graph support is declared as NEVER: host numbers of the first call stay in a captured graph, and no GPU with
such a torch has proved otherwise here. Its log-sum-exp is documented in another layout than its kernels
return, so that neither it nor sinks, which need it, are offered.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities
from torchpaged.backends.library_op import attention_op
from torchpaged.backends.planned_batch import blocks_in_use, finish, hidden_queries
from torchpaged.backends.spec import COMMON_FEATURES, AttentionSpec, GraphSupport
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.errors import BackendUnavailableError

_DTYPES = (torch.bfloat16, torch.float16)


def _attend(call: AttentionCall) -> None:
    if call.alibi_slopes is not None or call.sinks is not None or call.lse is not None:
        raise _unable("alibi, sinks and lse are not supported")
    if call.logits_soft_cap or call.chunk_size:
        raise _unable("logits_soft_cap and chunked are not supported")
    if call.q.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise _unable("graph support is NEVER")
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


def _unable(reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(f"backend 'torch_varlen' cannot run this attention: {reason}")


def unavailable() -> str | None:
    """Why torch's function can't be used here, or None."""
    try:
        from torch.nn.attention import current_flash_attention_impl
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn with a block table; pip install 'torch>=2.12'"
    known = inspect.signature(varlen_attn).parameters
    if "block_table" not in known or "seqused_k" not in known:
        return f"torch {torch.__version__} has no varlen_attn with a block table; pip install 'torch>=2.12'"
    if current_flash_attention_impl() is None:
        return (
            "torch's own FlashAttention-2 takes no block table; install FlashAttention-3 and call "
            "torch.nn.attention.activate_flash_attention_impl('FA3')"
        )
    return None if torch.cuda.is_available() else "no CUDA device is visible"


class VarlenCapabilities(Capabilities):
    """What depends on more than one thing at once."""

    def reject(self, spec: AttentionSpec) -> list[str]:
        """Every reason why ``spec`` can't run; empty if it can."""
        reasons = super().reject(spec)
        if spec.kv_dtype not in (None, spec.dtype):
            reasons.append(f"kv dtype {spec.kv_dtype} is not the queries' {spec.dtype}")
        if spec.head_dim % 8:
            reasons.append(f"head_dim {spec.head_dim} is no multiple of 8")
        return reasons


BACKEND = Backend(
    name="torch_varlen",
    capabilities=VarlenCapabilities(
        device_types=("cuda",),
        dtypes=_DTYPES,
        kv_dtypes=_DTYPES,
        graph_support=GraphSupport.NEVER,
        min_compute_capability=(9, 0),
        max_head_dim=256,
        different_head_dim_v=False,
        features=COMMON_FEATURES - {"logits_soft_cap", "alibi", "sinks", "chunked", "lse"},
    ),
    ops=attention_op("torchpaged_varlen", _attend),
    unavailable=unavailable,
)
