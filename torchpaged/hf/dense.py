"""Attention over keys and values that are no pools: on our kernels where they give what SDPA gives, else on
SDPA, and on neither where an argument would be dropped."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.layer import in_autocast
from torchpaged.hf.span_mask import both_directions, spans_of
from torchpaged.hf.uncached import attend, way_of

#: Arguments of the interface that change which keys are seen, and that no op here knows: refused, never
#: dropped; gathered keys are selected by a mask from ``indices``.
SPARSE = ("indices", "block_indices")
#: Of the `PagedCache` that answered for the masks which this thread's models asked for last, ``order``: a
#: reference to its `ForwardOrder`; None: no such cache did.
asked = threading.local()


def transformed(module: nn.Module) -> UnsupportedModelError:
    """The error of keys and values that are the pools no longer."""
    if torch.compiler.is_compiling() and getattr(module, "is_kv_shared_layer", False):
        return UnsupportedModelError(
            f"{type(module).__name__} shares another layer's pools and takes them through Tensor.to, "
            "behind which compiled code does not know them (transformers 5.17; not 5.23); call "
            "torchpaged.hf.attach(model), run it uncompiled, or use PagedCache(..., dense=True)"
        )
    return UnsupportedModelError(
        f"{type(module).__name__} changes the cached keys or values before attention, so that they are no "
        "longer the paged pools; use PagedCache(..., dense=True), which gathers them first"
    )


def sparse(name: str) -> UnsupportedModelError:
    """The error of a module that selects keys."""
    return UnsupportedModelError(
        f"{name} selects keys sparsely ({' or '.join(SPARSE)}), which torchpaged does not do yet: the "
        "selection would be dropped; call model.set_attn_implementation('sdpa') and use transformers' own "
        "cache"
    )


def require_cache(module: nn.Module, mask: Tensor | None) -> None:
    """Refuse a layer in training mode that came without the cache which answered for its mask: transformers
    takes caches from layers that checkpoint gradients, and the padding and windows would be lost with them.

    Args:
        module: an attention layer of a decoder that attends without a paged cache.
        mask: that it was given.

    Raises:
        ArgumentError: no layer has written what the masks were asked for.
    """
    if torch.compiler.is_compiling() or not module.training or not (mask is None or mask.numel() == 1):
        return
    found = getattr(asked, "order", None)
    order = None if found is None else found()
    if order is not None and order.announced is not None:
        raise ArgumentError(
            "past_key_values",
            "no PagedCache in training mode, where gradient checkpointing takes caches from the layers",
            f"one, and {type(module).__name__} without it",
            "call model.eval(), or leave past_key_values out",
        )


def attend_dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    is_causal: bool | None,
    kwargs: dict[str, Any],
    *,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """A call without a paged cache: on our kernels where they give what SDPA gives, else as SDPA does it.
    Arguments as of `torchpaged.hf.attention.paged_attention_forward`; ``kwargs`` are its further ones."""
    name = type(module).__name__
    if kwargs.get("block_indices") is not None:
        raise sparse(name)
    if kwargs.get("cache") is not None:
        raise UnsupportedModelError(
            f"{name} got a cache of continuous batching outside of it; call model.generate_batch, which "
            "runs an attention function of its own"
        )
    if spans_of(mask) is not None:
        raise both_directions(module, "other keys than those of its PagedCache")
    query, key, value = in_autocast(query, key, value)
    indices = kwargs.pop("indices", None)
    if indices is not None:
        mask = select(mask, indices, query.dtype, name)
    # A dense cache's mask is as long as its rows can be.
    require_cache(module, None if mask is not None and mask.shape[-1] != key.shape[2] else mask)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and query.shape[2] > 1
    needs_kernel = softcap is not None or sinks is not None
    way = None if bias is not None else way_of(module, query, key, value, mask, causal, dropout, needs_kernel)
    if way is not None:
        options = {"scale": scaling, "logits_soft_cap": softcap, "sinks": sinks}
        return attend(query, key, value, mask, causal, way, **options)
    if key.shape[0] != query.shape[0] and 1 not in (key.shape[0], query.shape[0]):
        raise transformed(module)  # blocks of a pool, taken for batch rows
    if needs_kernel and not (dropout and module.training):
        query_len, kv_len = query.shape[2], key.shape[2]
        if mask is None and bias is None and (query_len == kv_len or not causal):
            mask = torch.ones(1, 1, query_len, kv_len, dtype=torch.bool, device=query.device)
            mask = mask.tril() if causal else mask
        if mask is not None and mask.dim() == 4:
            return attend_by_formula(query, key, value, mask, scaling, softcap, sinks, bias)
    for argument, given in (("softcap", softcap), ("s_aux", sinks)):
        if given is not None:
            raise UnsupportedModelError(
                f"{name} needs {argument}, which SDPA drops; run it with a PagedCache, or "
                "set_attn_implementation('eager')"
            )
    if bias is not None:
        kwargs["position_bias"] = bias
    out: Tensor
    out, _ = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )
    return out


def select(mask: Tensor | None, indices: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The mask under which queries see only their selected keys.

    Args:
        mask: ``[batch, 1, query_len, kv_len]``, bool (true = seen) or additive.
        indices: ``[batch, query_len, top_k]``, positions of keys.
        dtype: of an additive mask's lowest value: the queries'.
        name: of the module, for the message.

    Raises:
        UnsupportedModelError: there is no such mask.
    """
    if mask is None or mask.dim() != 4 or indices.dim() != 3:
        raise UnsupportedModelError(
            f"{name} selects keys (indices) without a 4-D mask to select them in: the selection would be "
            "dropped; call model.set_attn_implementation('sdpa')"
        )
    chosen = torch.zeros(*indices.shape[:2], mask.shape[-1], dtype=torch.bool, device=mask.device)
    chosen = chosen.scatter(-1, indices.long(), True)[:, None]
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(dtype).min)


def attend_by_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention with a soft cap and sink logits, which SDPA drops, for masks that `way_of` has no way for,
    and where gradients are wanted.

    Args:
        query: ``[batch, num_heads, query_len, head_dim]``.
        key, value: ``[batch, num_kv_heads, kv_len, head_dim(_v)]``.
        mask: ``[batch or 1, 1, query_len, kv_len]``, bool (true = seen) or additive.
        scale: of the scores; None = ``head_dim ** -0.5``.
        softcap: of the scaled scores; None = off.
        sinks: ``[num_heads]``, or one of each query, ``[batch, num_heads, query_len, 1]``; None = off.
        bias: added to the scores, ``[batch or 1, num_heads or 1, query_len, kv_len]``.

    Returns:
        ``[batch, query_len, num_heads, head_dim_v]``.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    scores = (query @ key.mT).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    # Scores vanish beside the lowest number, so that a query that sees nothing gets a mean, as from eager.
    lowest = torch.finfo(torch.float32).min
    scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sinks = sinks[None, :, None, None] if sinks.dim() == 1 else sinks
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:3], 1)), -1)
    weights = F.softmax(scores, dim=-1)[..., : key.shape[2]]
    return (weights.to(value.dtype) @ value).transpose(1, 2)
