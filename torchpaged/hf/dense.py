"""Attention over keys and values that are no pools: on our kernels where they give what SDPA gives, else on
SDPA, and on neither where an argument would be dropped."""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.call import LayerCall, in_autocast
from torchpaged.hf.call_mask import held_by
from torchpaged.hf.uncached import attend, way_of

#: Arguments of the interface that change which keys are seen, and that no op here knows: refused, never
#: dropped; gathered keys are selected by a mask from ``indices``.
SPARSE = ("indices", "block_indices")
#: Of the `PagedCache` that answered for the masks which this thread's models asked for last, ``order``: a
#: reference to its `ForwardOrder`; None: no such cache did.
asked = threading.local()


def transformed(module: nn.Module) -> UnsupportedModelError:
    """The error of a module that attends with other keys and values than the pools."""
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


def _of_a_cache(mask: Tensor | None) -> bool:
    """Whether ``mask`` is a paged cache's placeholder, which says nothing by itself."""
    held = held_by(mask)
    return held is not None and held.rows is not None


def require_cache(module: nn.Module, mask: Tensor | None) -> None:
    """Refuse a layer in training mode that came without the cache which answered for its mask: transformers
    takes caches from layers that checkpoint gradients, and the padding and windows would be lost with them.

    Args:
        module: an attention layer of a decoder that attends without a paged cache.
        mask: that it was given.

    Raises:
        ArgumentError: no layer has written what the masks were asked for.
    """
    says_nothing = mask is None or mask.numel() == 1 or _of_a_cache(mask)
    if torch.compiler.is_compiling() or not module.training or not says_nothing:
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
    call: LayerCall,
    mask: Tensor | None,
    bias: Tensor | None,
    dropout: float,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """A call without a paged cache: on our kernels where they give what SDPA gives, else as SDPA does it.

    Args:
        call: with dense keys and values ``[batch, num_kv_heads, kv_len, head_dim(_v)]``.
        mask, bias, dropout, is_causal, kwargs: as of `torchpaged.hf.attention.paged_attention_forward`.
    """
    module, name = call.module, type(call.module).__name__
    if kwargs.get("block_indices") is not None:
        raise sparse(name)
    if kwargs.get("cache") is not None:
        raise UnsupportedModelError(
            f"{name} got a cache of continuous batching outside of it; call model.generate_batch, which "
            "runs an attention function of its own"
        )
    query, key, value = in_autocast(call.query, call.key, call.value)
    query_len, kv_len = query.shape[2], key.shape[2]
    call = call._replace(query=query, key=key, value=value, causal=bool(call.causal) and query_len > 1)
    indices = kwargs.pop("indices", None)
    if indices is not None:
        mask = select(mask, indices, query.dtype, name)
    # A dense cache's mask is as long as its rows can be.
    require_cache(module, None if mask is not None and mask.shape[-1] != kv_len else mask)
    if _of_a_cache(mask):
        raise UnsupportedModelError(
            f"{name} attends with other keys than those of the PagedCache that its mask was made for, and "
            "padding or image tokens would be lost; use PagedCache(..., dense=True)"
        )
    way = None if bias is not None else way_of(call, mask, dropout)
    if way is not None:
        return attend(call, mask, way)
    if key.shape[0] != query.shape[0] and 1 not in (key.shape[0], query.shape[0]):
        raise transformed(module)  # blocks of a pool, taken for batch rows
    if mask is not None and mask.shape[-1] not in (1, kv_len):
        raise ArgumentError(
            "attention_mask",
            f"a mask over the {kv_len} keys of {name}",
            f"one of shape {list(mask.shape)}",
            "a PagedCache that gathers keys has max_seq_len of them: pass it a 2-D mask, or use "
            "DynamicCache(config=model.config) for masks of your own",
        )
    needs_kernel = call.softcap is not None or call.sinks is not None
    if needs_kernel and not (dropout and module.training):
        if mask is None and bias is None and (query_len == kv_len or not call.causal):
            mask = torch.ones(1, 1, query_len, kv_len, dtype=torch.bool, device=query.device)
            mask = mask.tril() if call.causal else mask
        if mask is not None and mask.dim() == 4:
            return attend_by_formula(call, mask, bias)
    for argument, given in (("softcap", call.softcap), ("s_aux", call.sinks)):
        if given is not None:
            raise UnsupportedModelError(
                f"{name} needs {argument}, which SDPA drops; run it with a PagedCache, or "
                "set_attn_implementation('eager')"
            )
    further = kwargs if bias is None else {**kwargs, "position_bias": bias}
    options = {"dropout": dropout, "scaling": call.scaling, "is_causal": is_causal, **further}
    out: Tensor = sdpa_attention_forward(module, query, key, value, mask, **options)[0]
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


def attend_by_formula(call: LayerCall, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention with a soft cap and sink logits, which SDPA drops, for masks that `way_of` has no way for,
    and where gradients are wanted.

    Args:
        call: as of `attend_dense`; its sinks may be of each query, ``[batch, num_heads, query_len, 1]``.
        mask: ``[batch or 1, 1, query_len, kv_len]``, bool (true = seen) or additive.
        bias: added to the scores, ``[batch or 1, num_heads or 1, query_len, kv_len]``.

    Returns:
        ``[batch, query_len, num_heads, head_dim_v]``.
    """
    groups, sinks = call.query.shape[1] // call.key.shape[1], call.sinks
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (call.key, call.value))
    scores = (call.query @ key.mT).float() * call.scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
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
