"""Attention of requests whose groups share prefixes, as one op: `cascade_ops` and `attend_with_prefixes`;
`torchpaged.cascade` is the public door."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchpaged.backends import attention_spec
from torchpaged.backends.choose.for_call import able_backend, choose_ops, traced_ops
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.attention.call import CascadeCall
from torchpaged.custom_ops.attention.check import check_cascade_attention
from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.functional.arguments import traced_sizes

#: Whose ``cascade_attention`` is more than two calls of their ``paged_attention`` here or its specification.
#: On a CPU the native kernels are called twice; a backend around a library has no such op.
_HAVE_IT = ("reference", "triton", "cuda")


def cascade_ops(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    scale: float | None,
    logits_soft_cap: float | None,
    sinks: Tensor | None,
    ops: BackendOps | None,
) -> BackendOps | None:
    """The handles whose op ``cascade_attention`` serves a call, or None: two passes do.

    Args:
        q, k_cache, v_cache, scale, logits_soft_cap, sinks: as in `torchpaged.paged_attention`.
        ops: held to what their backend declares; None: those that every other door would choose.

    Raises:
        BackendUnavailableError: as `torchpaged.paged_attention`.
    """
    if torch.compiler.is_compiling():
        has_soft_cap = False
        if logits_soft_cap:  # a symbol perhaps, which a branch makes a constant
            has_soft_cap = True
        features = (has_soft_cap, False, sinks is not None, True, False)
        attention = (*traced_sizes(q, k_cache, v_cache), True, (-1, -1), 0, *features)
        ops = traced_ops(q.device, attention, ops, False)
    else:
        spec = attention_spec(
            device=q.device,
            dtype=q.dtype,
            num_heads=q.shape[1],
            num_kv_heads=k_cache.shape[2],
            head_dim=q.shape[2],
            head_dim_v=v_cache.shape[3],
            block_size=k_cache.shape[1],
            kv_dtype=k_cache.dtype,
            sinks=sinks,
            lse=True,
            logits_soft_cap=logits_soft_cap,
            scale=scale,
        )
        if ops is None:
            ops = choose_ops(q.device, spec)
        elif ops is not BACKEND_OPS["default"]:
            able_backend(ops, spec)
    return ops if has_cascade(ops, q.device) else None


def has_cascade(ops: BackendOps, device: torch.device) -> bool:
    """Whether these handles have a ``cascade_attention`` of their own on a device."""
    names = (*_HAVE_IT, "default") if device.type == "cuda" else _HAVE_IT
    return any(ops.paged_attention is BACKEND_OPS[name].paged_attention for name in names)


def attend_with_prefixes(
    ops: BackendOps, tensors: Any, out: Tensor, lse: Tensor | None, **options: Any
) -> None:
    """The op on arguments that are checked here; ``tensors``: those before ``out`` in
    ``custom_ops/attention/schema.py``."""
    refuse_grad(q=tensors[0], sinks=options.get("sinks"))
    if not torch.compiler.is_compiling():
        check_cascade_attention(CascadeCall.of(*tensors, out, lse, **options))
    ops.cascade_attention(*tensors, out, lse, **options)
