"""The attention and mask functions behind ``set_attn_implementation("torchpaged")``.

A call is paged if its key *and* value are a paged cache's own pools. Calls without a cache (encoders, vision
towers) run on the same kernels where `torchpaged.hf.uncached` gives what SDPA gives. Anything else (training,
another cache) goes to SDPA as it would have without torchpaged, except where SDPA would silently drop an
argument: then it raises.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, eager_mask, sdpa_mask

from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.call import LayerCall, in_autocast
from torchpaged.hf.call_mask import CallMask, MaskRequest, describe, held_by
from torchpaged.hf.cross import attend_across
from torchpaged.hf.dense import SPARSE, asked, attend_dense, sparse, transformed
from torchpaged.hf.layer import PagedLayer, gathered_from, layer_of
from torchpaged.hf.mask_functions import is_causal as is_causal_mask
from torchpaged.hf.model_classes import fill_class_tables, needs_eager_mask
from torchpaged.hf.owner import cache_of
from torchpaged.hf.row_refusals import require_new, require_no_weights, require_same_model
from torchpaged.hf.several_calls import attend_rolling, attend_with_spans
from torchpaged.hf.support import NAME as NAME
from torchpaged.hf.uncached import type_of_encoder


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
        attention_mask: on the paged path what `paged_mask` gave: None, or a placeholder.
        scaling: softmax scale; None = ``head_dim ** -0.5``.
        sliding_window: keys visible, the own one included; overrides the cache layer's.
        softcap, s_aux, sinks: soft cap and sink logits (``sinks`` is the newer name of ``s_aux``).
        alibi_slopes: ``[num_heads]`` float32; for `torchpaged.hf.models.decoders`, on the paged path only.
        masks_itself: the module's window is in none of the masks that its model asks for.
        shared_pools: the pools behind ``key`` and ``value``, where a trace lost them; for
            `torchpaged.hf.models.gemma`.

    Returns:
        ``([batch, query_len, num_heads, head_dim_v], None)``.

    Raises:
        UnsupportedModelError: the model needs something that the paged path would get wrong.
        BackendUnavailableError: the cache's backend declares not to run this attention.
    """
    key, value = shared_pools or (key, value)
    layer, sinks = layer_of(key), s_aux if sinks is None else sinks
    if layer_of(value) is not layer:
        raise transformed(module)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    require_no_weights(kwargs)
    if layer is None:
        require_same_model(gathered_from(key) or gathered_from(value), module)
        call = LayerCall(module, query, key, value, causal, None, softcap, sinks, None, scaling)
        return attend_dense(call, attention_mask, position_bias, dropout, is_causal, kwargs), None
    key, value = layer.pools_of(key, value)
    (query,) = in_autocast(query)
    masks, window = layer.owner.masks, layer.window if sliding_window is None else sliding_window or None
    # The mask's causality, where the model asks for one: modules may say False and mask by themselves. No
    # mask is asked of a cache for cross attention.
    crosses = masks.causal is None and not causal
    causal = causal if masks.causal is None else masks.causal
    latents = kwargs.get("indices"), kwargs.get("absorbed", False)
    options = causal, window, softcap, sinks, alibi_slopes, scaling, *latents
    call = LayerCall(module, query, key, value, *options)
    # T5's cross attention has no bias, and comes with zeros for one.
    unbiased = crosses and getattr(module, "has_relative_attention_bias", None) is False
    _refuse(layer, call, dropout, None if unbiased else position_bias, kwargs)
    if crosses:
        return attend_across(layer, call, attention_mask), None
    held = None if attention_mask is None else _held_of(layer, call, attention_mask)
    if query.shape[2] > 1 and not masks_itself and not torch.compiler.is_compiling():
        masks.require_kind(layer, window)
    if getattr(module, "is_kv_shared_layer", False):  # Gemma 4 leaves out queries that give no logits
        layer.owner.see_queries(query.shape[0], query.shape[2])
    if held is not None and held.has_spans:
        return attend_with_spans(layer, call, held), None
    return (attend_rolling(layer, call) if layer.rolls else layer.attend(call)), None


def _refuse(
    layer: PagedLayer, call: LayerCall, dropout: float, bias: Tensor | None, kwargs: dict[str, Any]
) -> None:
    """What the paged path would get wrong. Only cheap host facts: this runs in every layer."""
    refuse_grad(query=call.query, sinks=call.sinks)
    if bias is not None:
        raise UnsupportedModelError(
            f"{type(call.module).__name__} adds a position bias to its scores, which paged attention does "
            "not take; use PagedCache(..., dense=True)"
        )
    rows = None if torch.compiler.is_compiling() else layer.owner.rows
    if rows is not None:
        require_new(rows, call.query.shape[2], written=True, options=kwargs)
        require_same_model(rows, call.module)
    for name in SPARSE:
        if kwargs.get(name) is not None and not (layer.latent and name == "indices"):
            raise sparse(type(call.module).__name__)
    if dropout and call.module.training:
        raise ArgumentError(
            "dropout", "0 with a PagedCache (inference only)", str(dropout), "call model.eval()"
        )


def _held_of(layer: PagedLayer, call: LayerCall, mask: Tensor) -> CallMask | None:
    """What ``mask`` holds, which `paged_mask` made for the forward that runs; None of the one that stands for
    none, where modules take a mask for granted.

    Raises:
        ArgumentError: it is another mask.
        UnsupportedModelError: it was made for another forward.
    """
    owner, held = layer.owner, held_by(mask)
    if held is None and owner.family.takes_no_none and mask.shape == (1, 1, 1, 1):
        return None
    if held is None or held.rows is None or held.rows is not owner.rows:
        own = owner.masks.causal is not None or owner.keys_of_queries
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
    if not torch.compiler.is_compiling():
        held.require_forward(call.query.shape[0], call.query.shape[2])
    return held


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
    outside compiled code, and every later mask is checked against it. Where a prompt is padded, or tokens see
    each other in both directions, a placeholder says so (`torchpaged.hf.call_mask`).
    """
    cache, device = cache_of(kv_offset), kwargs.get("device", "cpu")
    kv_offset = 0 if cache is not None else kv_offset
    sizes = batch_size, q_length, kv_length
    request = MaskRequest(*sizes, attention_mask, mask_function, local_size, q_offset, kv_offset, device)
    if not torch.compiler.is_compiling() and (cache is not None or is_causal_mask(mask_function)):
        # A mask of cross attention says nothing about caches.
        order = getattr(cache, "order", None)  # a packed step has none
        asked.order = None if order is None else weakref.ref(order)
    if cache is None:
        return _mask_without_cache(request, allow_is_causal_skip, kwargs)
    if cache.dense:
        cache.masks.require_next(request)
        cache.masks.note_padding(request)
        cache.masks.require_whole_spans(request)
        if attention_mask is None and mask_function is not causal_mask_function:
            # There are max_seq_len keys, and only a causal mask hides those behind the tokens.
            written = torch.arange(kv_length, device=device)[None] < q_offset + q_length
            request = request._replace(padding=written.expand(batch_size, -1))
        dense: Tensor | None = eager_mask(**request.arguments(), **kwargs)
        return dense
    marked: Tensor | None = cache.masks.observe(request)
    if marked is None and cache.family.takes_no_none:
        return torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device)
    return marked


def _mask_without_cache(request: MaskRequest, may_skip: bool, options: dict[str, Any]) -> Tensor | None:
    """transformers' own, which carries what it holds for `torchpaged.hf.uncached`.

    Attention of a model's own adds the mask, and takes None for no mask at all, and so does a module that
    leaves causality to its mask; T5 of transformers 5.17 adds it to a bias even under SDPA. Such a module
    gets a mask of all keys, too: Splinter's says nothing of causality.
    """
    config, mask = options.get("config"), None
    if needs_eager_mask(getattr(config, "model_type", "")):
        mask = eager_mask(**request.arguments(), **{**options, "allow_is_bidirectional_skip": False})
    else:
        sizes = {"local_size": request.local_size, "allow_is_causal_skip": may_skip}
        mask = sdpa_mask(**request.arguments(), **options, **sizes)
    if mask is not None:
        describe(mask, request, type_of_encoder(config))
    return mask


def register(name: str = NAME) -> None:
    """Register both functions with transformers, and the name with models that have tables of their own; done
    at import."""
    AttentionInterface.register(name, paged_attention_forward)
    AttentionMaskInterface.register(name, paged_mask)
    fill_class_tables(name)
