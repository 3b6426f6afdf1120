"""The attention and mask functions behind ``set_attn_implementation("torchpaged")``.

A call is paged if its key *and* value are a paged cache's own pools. Calls without a cache (encoders, vision
towers) run on the same kernels where `torchpaged.hf.uncached` gives what SDPA gives. Anything else (training,
another cache) goes to SDPA as it would have without torchpaged, except where SDPA would silently drop an
argument: then it raises.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError, UnsupportedModelError
from torchpaged.hf.class_tables import fill_class_tables
from torchpaged.hf.cross import cross_batch, require_no_plan
from torchpaged.hf.indexed import attend_with_sinks, select
from torchpaged.hf.known_models import TAKES_NO_NONE
from torchpaged.hf.latent import LatentLayer, latent_attention
from torchpaged.hf.layer import PagedLayer, by_token, cache_of, layer_of
from torchpaged.hf.mask_rows import describe
from torchpaged.hf.masks import MaskKind
from torchpaged.hf.masks import is_causal as is_causal_mask
from torchpaged.hf.rolling_attention import attend_in_steps, require_kept
from torchpaged.hf.span_mask import attend_spans, spans_of
from torchpaged.hf.support import needs_eager_mask
from torchpaged.hf.uncached import attend as attend_uncached
from torchpaged.hf.uncached import type_of_encoder, way_of
from torchpaged.prefixes import attend_with_prefixes
from torchpaged.profiling import is_on as is_profiling
from torchpaged.profiling import ranged_attention

#: The name under which the functions are registered.
NAME = "torchpaged"
# Arguments of the interface that change which keys are seen, and that no op here knows: refused, never
# dropped; gathered keys are selected by a mask from ``indices``.
_SPARSE = ("indices", "block_indices")
# Of the `PagedCache` that answered for the masks which this thread's models asked for last, ``order``: a
# reference to its `ForwardOrder`; None: no such cache did.
_asked = threading.local()


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    alibi_slopes: Tensor | None = None,
    masks_itself: bool = False,
    shared_pools: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function.

    Args:
        module: the attention layer that calls.
        query: ``[batch, num_heads, query_len, head_dim]``.
        key, value: pools of a `PagedCache`, or dense ``[batch, num_kv_heads, kv_len, head_dim]``.
        attention_mask: unused on the paged path (its mask function returns None).
        scaling: softmax scale; None = ``head_dim ** -0.5``.
        sliding_window: keys visible, the own one included; overrides the cache layer's.
        softcap, s_aux, sinks: soft cap and sink logits (``sinks`` is the newer name of ``s_aux``).
        alibi_slopes: ``[num_heads]`` float32; for `torchpaged.hf.own_attention`, on the paged path only.
        masks_itself: the module's window is in none of the masks that its model asks for.
        shared_pools: the pools behind ``key`` and ``value``, where a trace lost them; for
            `torchpaged.hf.traceable`.

    Returns:
        ``([batch, query_len, num_heads, head_dim_v], None)``.

    Raises:
        UnsupportedModelError: the model needs something that the paged path would get wrong.
        BackendUnavailableError: the cache's backend declares not to run this attention.
    """
    key, value = shared_pools or (key, value)
    layer = layer_of(key)
    sinks = s_aux if sinks is None else sinks
    if layer is None or layer_of(value) is not layer:
        if layer is not None or layer_of(value) is not None:
            raise _transformed(module)
        return _dense(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling,
            dropout,
            softcap,
            sinks,
            position_bias,
            is_causal,
            kwargs,
        )
    key, value = layer.pools_of(key, value)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = layer.window if sliding_window is None else sliding_window or None
    batch, num_heads, query_len, head_dim = query.shape
    owner = layer.owner
    # The mask's, where the model asks for one: modules may say False and mask by themselves. No mask is asked
    # of a cache for cross attention.
    crosses = owner.masks.causal is None and not causal
    causal = causal if owner.masks.causal is None else owner.masks.causal
    marked = spans_of(attention_mask)
    bias, mask = position_bias, None if marked is not None else attention_mask
    if crosses:
        # T5's cross attention has no bias, and comes with zeros for one. The mask is read below.
        bias, mask = None if getattr(module, "has_relative_attention_bias", bias) is False else bias, None
    _refuse(module, layer, query, mask, dropout, bias, kwargs)
    metadata = owner.metadata_of(layer, batch, 1 if crosses else query_len)
    requests = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
    if crosses:
        require_no_plan(owner.backend.session)
        known = None if torch.compiler.is_compiling() else owner.rows.first_position(0)
        requests = cross_batch(metadata, attention_mask, query_len, known)
    if query_len > 1 and not masks_itself and not torch.compiler.is_compiling():
        owner.masks.require_kind(layer, window)
    scale = head_dim**-0.5 if scaling is None else float(scaling)
    if isinstance(layer, LatentLayer):
        if marked is not None:
            raise _spans(module, "latents")
        further = {"sliding_window": window, "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes}
        further["tree_mask"] = metadata.tree_mask
        return latent_attention(module, layer, query, metadata, causal, scale, further), None
    if marked is not None and (alibi_slopes is not None or not causal):
        raise _spans(module, "linear biases, or without causality,")
    if layer.rolls:
        require_kept(module, layer, window, causal and marked is None)
    owner.backend.hold(layer, query, key, value, causal, window, softcap, sinks, scaling, alibi_slopes)
    kind = MaskKind(True, window, layer.chunk)
    spans = None if marked is None else marked.batch_for(kind, batch, query_len)
    beside: dict[str, Tensor] = {}
    if spans is not None:
        own_window = window if spans.windowed else None
        beside = owner.backend.hold_spans(layer, query, key, value, own_window, softcap, sinks, scaling)
    trees = {} if metadata.tree_mask is None else {"tree_mask": metadata.tree_mask}
    if trees and not owner.backend.capabilities.tree_mask:
        raise BackendUnavailableError(
            f"backend {owner.backend.choice.name!r} cannot run this attention: tree_mask is not supported"
        )
    alike = causal and window is None and alibi_slopes is None and not trees and marked is None
    attend = owner.backend.ops.paged_attention
    if not torch.compiler.is_compiling() and is_profiling():
        attend = ranged_attention(attend, layer.index)
    options: dict[str, Any] = {
        "scale": scale,
        "logits_soft_cap": 0.0 if softcap is None else float(softcap),
        "sinks": sinks,
        **layer.scales,
    }
    own: dict[str, Any] = {
        "causal": causal,
        "window_left": -1 if window is None else window - 1,
        "alibi_slopes": alibi_slopes,
        "chunk_size": layer.chunk or 0,
        **trees,
        **options,
        **layer.workspace,
    }
    if layer.rolls and not owner.takes_at_once(layer, query_len):
        return attend_in_steps(layer, query, attend, own), None
    q = by_token(query)
    out = q.new_empty(batch * query_len, num_heads, value.shape[-1])
    if metadata.prefixes is not None and layer.reads_once and alike:
        options |= {"max_query_len": metadata.max_query_len, "semaphore": layer.workspace.get("semaphore")}
        call = AttentionCall(q, key, value, *requests, out, None, **options)
        attend_with_prefixes(owner.backend.ops, call, metadata.prefixes)
        return out.view(batch, query_len, num_heads, value.shape[-1]), None
    attend(q, key, value, *requests, out, None, max_query_len=metadata.max_query_len, **own)
    if spans is not None:
        left = -1 if window is None or not spans.windowed else window - 1
        attend_spans(attend, spans, q, key, value, out, window_left=left, **options, **beside)
    return out.view(batch, query_len, num_heads, value.shape[-1]), None


def _transformed(module: nn.Module) -> UnsupportedModelError:
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


def _spans(module: nn.Module, beside: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(module).__name__} has image tokens that see each other in both directions, which attention "
        f"with {beside} does not express; use PagedCache(..., dense=True)"
    )


def _sparse(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} selects keys sparsely ({' or '.join(_SPARSE)}), which torchpaged does not do yet: the "
        "selection would be dropped; call model.set_attn_implementation('sdpa') and use transformers' own "
        "cache"
    )


def _refuse(
    module: nn.Module,
    layer: PagedLayer,
    query: Tensor,
    mask: Tensor | None,
    dropout: float,
    bias: Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    """What the paged path would get wrong. Only cheap host facts: this runs in every layer."""
    name = type(module).__name__
    if bias is not None:
        raise UnsupportedModelError(
            f"{name} adds a position bias to its scores, which paged attention does not take; use "
            "PagedCache(..., dense=True)"
        )
    if any(kwargs.get(k) is not None for k in _SPARSE):
        raise _sparse(name)
    if mask is not None:
        own = layer.owner.masks.causal is not None or layer.owner.keys_of_queries
        raise ArgumentError(
            "attention_mask",
            "a 2-D padding mask (left padding) or None with a PagedCache",
            f"a mask of shape {list(mask.shape)}",
            "use DynamicCache(config=model.config) for masks of your own"
            if own
            else (
                "for cross attention to a padded encoder pass EncoderDecoderCache(PagedCache(...), "
                "DynamicCache(config=model.config))"
            ),
        )
    if dropout and module.training:
        raise ArgumentError(
            "dropout", "0 with a PagedCache (inference only)", str(dropout), "call model.eval()"
        )
    refuse_grad(query=query)


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
    asked = getattr(_asked, "order", None)
    order = None if asked is None else asked()
    if order is not None and order.announced is not None:
        raise ArgumentError(
            "past_key_values",
            "no PagedCache in training mode, where gradient checkpointing takes caches from the layers",
            f"one, and {type(module).__name__} without it",
            "call model.eval(), or leave past_key_values out",
        )


def _dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """A call without a paged cache: on our kernels where they give what SDPA gives, else as SDPA does it."""
    name = type(module).__name__
    if kwargs.get("block_indices") is not None:
        raise _sparse(name)
    if kwargs.get("cache") is not None:
        raise UnsupportedModelError(
            f"{name} got a cache of continuous batching outside of it; call model.generate_batch, which "
            "runs an attention function of its own"
        )
    if spans_of(mask) is not None:
        raise _spans(module, "other keys than those of its PagedCache")
    indices = kwargs.pop("indices", None)
    if indices is not None:
        mask = select(mask, indices, query.dtype, name)
    plain = softcap is None and not (dropout and module.training) and mask is not None and mask.dim() == 4
    if sinks is not None and mask is not None and plain and (indices is not None or bias is not None):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_with_sinks(query, key, value, mask, scale, sinks, bias), None
    # A dense cache's mask is as long as its rows can be.
    require_cache(module, None if mask is not None and mask.shape[-1] != key.shape[2] else mask)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and query.shape[2] > 1
    needs_kernel = softcap is not None or sinks is not None
    way = None if bias is not None else way_of(module, query, key, value, mask, causal, dropout, needs_kernel)
    if way is not None:
        options = {"scale": scaling, "logits_soft_cap": softcap, "sinks": sinks}
        return attend_uncached(query, key, value, mask, causal, way, **options), None
    for argument, given in (("softcap", softcap), ("s_aux", sinks)):
        if given is not None:
            raise UnsupportedModelError(
                f"{name} needs {argument}, which SDPA drops; run it with a PagedCache, or "
                "set_attn_implementation('eager')"
            )
    if key.shape[0] != query.shape[0] and 1 not in (key.shape[0], query.shape[0]):
        raise _transformed(module)  # blocks of a pool, taken for batch rows
    if bias is not None:
        kwargs["position_bias"] = bias
    out, _ = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )
    return out, None


def paged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask function: SDPA's, unless a paged cache answered `get_mask_sizes` just before
    (``kv_offset`` carries it).

    On the paged path there is no mask: the padding is read from the 2-D ``attention_mask`` once, on the host,
    outside compiled code, and every later mask is checked against it. Where tokens see each other in both
    directions, a placeholder carries them (`torchpaged.hf.span_mask`).
    """
    cache = cache_of(kv_offset)
    if not torch.compiler.is_compiling() and (cache is not None or is_causal_mask(mask_function)):
        # A mask of cross attention says nothing about caches.
        order = getattr(cache, "order", None)  # a packed step has none
        _asked.order = None if order is None else weakref.ref(order)
    if cache is not None and not cache.dense:
        marked: Tensor | None = cache.masks.observe(
            attention_mask,
            batch_size,
            q_length,
            mask_function,
            local_size,
            kwargs.get("device", "cpu"),
            q_offset,
        )
        if cache.name in TAKES_NO_NONE:
            return torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=kwargs.get("device", "cpu"))
        return marked
    if cache is not None:
        cache.masks.require_next(attention_mask, batch_size, q_length)
        kv_offset = 0
    # Attention of a model's own adds the mask, and takes None for no mask at all, and so does a module that
    # leaves causality to its mask; T5 of transformers 5.17 adds it to a bias even under SDPA. Without a
    # cache, such a module gets a mask of all keys, too: Splinter's says nothing of causality.
    config = kwargs.get("config")
    model_type = getattr(config, "model_type", "")
    if cache is not None:
        make, options = eager_mask, kwargs
    elif needs_eager_mask(model_type):
        make, options = eager_mask, {**kwargs, "allow_is_bidirectional_skip": False}
    else:
        make, options = (
            sdpa_mask,
            {**kwargs, "local_size": local_size, "allow_is_causal_skip": allow_is_causal_skip},
        )
    mask: Tensor | None = make(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )
    if mask is not None and cache is None:
        offsets = q_offset, kv_offset
        describe(mask, attention_mask, mask_function, local_size, offsets, type_of_encoder(config))
    return mask


def register(name: str = NAME) -> None:
    """Register both functions with transformers, and the name with models that have tables of their own; done
    at import."""
    AttentionInterface.register(name, paged_attention_forward)
    AttentionMaskInterface.register(name, paged_mask)
    fill_class_tables(name)
