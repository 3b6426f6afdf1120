"""transformers' continuous batching (``generate_batch``) on the kernels of torchpaged.

    import torchpaged.hf
    model.set_attn_implementation("paged|torchpaged")       # or "torchpaged"
    outputs = model.generate_batch(inputs, generation_config=...)

transformers keeps its own cache, scheduler and sampling. Its steps are packed: prefills, chunks of them and
decodes in one row of tokens. Full-attention layers write into that cache and read it through a block table,
whatever the mixture, where transformers' own attention gathers all keys and values first. Steps of decodes
alone get transformers' block table; for others one is made on the device from the indices that transformers
sends along, once per step. Sliding-window layers keep a ring of tokens, which new tokens overwrite. A single
token's window is the whole ring, in whatever order, so that steps of decodes alone read the ring's pages as a
block table, too; prompts still need what they overwrite, and their keys are gathered as transformers does it.

That cache has no place for a state per request: models whose layers keep some are run by the engine, behind
the same calls (`torchpaged.engine.generate_batch`).

CUDA graphs need a GPU: transformers itself turns them off without one.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    PagedAttentionCache,
    initialization,
)

from torchpaged.compat.packed import packed_pools
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.functional import paged_attention, write_kv
from torchpaged.hf.continuous_cache import BatchLayer, gathered, keys_of_kind, layer_of, step_of
from torchpaged.hf.families import family_of
from torchpaged.hf.model_classes import has_own_attention
from torchpaged.hf.packed_mixers import mixers_of

#: What a user asks for, with transformers 5.17; 5.23 strips the prefix, so that "torchpaged" is left.
PAGED_NAME = "paged|torchpaged"
#: What a model runs as inside ``generate_batch`` where the prefix is stripped. No mask function has this
#: name: transformers makes no mask then.
BATCH_NAME = "torchpaged_continuous_batching"
_NAMES = ("torchpaged", PAGED_NAME, BATCH_NAME)


def continuous_attention_forward(
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
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function inside ``generate_batch``.

    Args:
        module: the attention layer that calls; its ``layer_idx`` names the layer of the cache.
        query: ``[1, num_heads, num_tokens, head_dim]``, of all requests, packed.
        key, value: ``[1, num_kv_heads, num_tokens, head_dim(_v)]``, those of this step.
        attention_mask: None.
        scaling, sliding_window, softcap, s_aux, sinks: as in `torchpaged.hf.attention`.
        cache: transformers' ``PagedAttentionCache``.
        kwargs: of the step: ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q``, ``max_length_k``
            (``max_seqlen_q``, ``max_seqlen_k`` in 5.17), ``read_index``, ``write_index``, ``block_table``.

    Returns:
        ``([1, num_tokens, num_heads, head_dim_v], None)``.

    Raises:
        ArgumentError: there is no cache, or a mask.
        UnsupportedModelError: the layer needs something that would be dropped.
    """
    layer = layer_of(module, cache)
    _refuse(module, layer, attention_mask, position_bias, dropout, sliding_window, kwargs)
    head_dim, width = query.shape[-1], value.shape[-1]
    if width < layer.v_pool.shape[-1]:  # such as DeepSeek's; the cache has one width for both
        value = F.pad(value, [0, layer.v_pool.shape[-1] - width])
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    starts = kwargs["cu_seq_lens_q"]
    longest = max(kwargs["max_length_q"] if "max_length_q" in kwargs else kwargs["max_seqlen_q"], 1)
    options: dict[str, Any] = {
        "max_query_len": longest,
        "scale": head_dim**-0.5 if scaling is None else float(scaling),
        "logits_soft_cap": softcap,
        "sinks": s_aux if sinks is None else sinks,
    }
    step = step_of(cache, layer, starts, q.shape[0], longest, kwargs)
    if step is not None:
        own = layer.k_pool, layer.v_pool
        write_kv(k, v, *own, step.slots)
        # All keys that are in a ring are in the window; rotated keys have no order.
        out = paged_attention(q, *own, step.block_table, step.seq_lens, starts, **options)
    else:
        assert layer.window is not None
        keys, values = gathered(cache, module.layer_idx, layer, k, v, kwargs)
        ends, max_len = keys_of_kind(kwargs, layer.kind)
        pools = packed_pools(keys, values, ends[:-1], max_len)
        window = (layer.window - 1, -1)
        out = paged_attention(q, *pools, ends.diff(), starts, window_size=window, **options)
    return out[None, :, :, :width], None


def _refuse(
    module: nn.Module,
    layer: BatchLayer,
    mask: Tensor | None,
    bias: Tensor | None,
    dropout: float,
    sliding_window: int | None,
    kwargs: dict[str, Any],
) -> None:
    name = type(module).__name__
    if mask is not None:
        raise ArgumentError("attention_mask", "None in continuous batching", f"shape {list(mask.shape)}")
    if bias is not None:
        raise UnsupportedModelError(f"{name} adds a position bias to its scores; paged attention takes none")
    if dropout and module.training:
        raise ArgumentError("dropout", "0 (inference only)", str(dropout), "call model.eval()")
    if sliding_window and layer.window is not None and sliding_window != layer.window:
        raise UnsupportedModelError(
            f"{name} has a window of {sliding_window} keys, and its cache keeps {layer.window} of them"
        )
    if sliding_window and layer.window is None:
        raise UnsupportedModelError(
            f"{name} has a window of {sliding_window} keys that its configuration's layer_types don't tell of"
        )
    if any(kwargs.get(sparse) is not None for sparse in ("indices", "block_indices")):
        raise UnsupportedModelError(f"{name} selects keys sparsely; the selection would be dropped")


def register_continuous_batching(batches: Callable[[], Any]) -> None:
    """Register the attention function, and have ``generate_batch`` take our names; done at import.

    transformers knows by name which implementations its continuous batching runs, at two places that are no
    interface. The manager's method that switches implementations refuses all others in 5.23, and puts
    FlashAttention in the place of one without the prefix in 5.17. The function that turns block tables off
    leaves them to FlashAttention alone, so that the host would list every token of the cache in every decode
    step. Both are asked about our names first. So is the manager's construction, by which a model with states
    gets the engine's batch processor. From 5.24 on layers call ``update`` of its cache, which stores what our
    attention function stores, and hand them no cache.

    Args:
        batches: gives `torchpaged.engine.generate_batch`, which stands on this package, when it is needed.
    """
    for name in (PAGED_NAME, BATCH_NAME):
        AttentionInterface.register(name, continuous_attention_forward)
    if not hasattr(ContinuousBatchingManager.switch_to_cb_friendly_attn, "_torchpaged"):
        ContinuousBatchingManager.__init__ = _making(ContinuousBatchingManager.__init__, batches)
        ContinuousBatchingManager.switch_to_cb_friendly_attn = _switching(
            ContinuousBatchingManager.switch_to_cb_friendly_attn
        )
        initialization.ensure_decode_fast_path_is_available = _with_block_tables(
            initialization.ensure_decode_fast_path_is_available
        )
        PagedAttentionCache.update = _updating(PagedAttentionCache.update)


def _require_batchable(model: Any) -> None:
    """Refuse models to which transformers' continuous batching gives wrong tokens, whatever attends."""
    name, model_type = type(model).__name__, getattr(model.config, "model_type", "")
    if has_own_attention(model_type):
        raise UnsupportedModelError(f"{name} has attention of its own, which knows no paged cache")
    family, config = family_of(model_type), model.config.get_text_config(decoder=True)
    width = config.qk_nope_head_dim + config.qk_rope_head_dim if family.caches_latents else 0
    if width > getattr(config, "head_dim", width):  # of most, that of their rotation
        raise UnsupportedModelError(
            f"{name} expands its latents to keys of {width} numbers, and transformers' cache of batches has "
            f"places of {config.head_dim}, the config's head_dim; call generate, or make a Generator"
        )
    why = family.needs_dense
    if why and not why.startswith("expands"):  # latents are expanded before they are stored
        raise UnsupportedModelError(
            f"{name} {why}, where continuous batching stores what comes; call generate"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(
            f"{name} counts positions by itself, and would take packed requests for one; call generate"
        )


def _keeps_states(model: Any) -> bool:
    """Whether layers keep a state per request. RecurrentGemma's are its modules', of which transformers
    5.17's caches know nothing."""
    layers = DynamicCache(config=model.config).layers
    return bool(mixers_of(model)) or any(
        isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers
    )


def _making(theirs: Callable[..., Any], batches: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def init(
        self: Any,
        model: Any,
        generation_config: Any,
        continuous_batching_config: Any,
        workload_hints: Any = None,
    ) -> None:
        given = generation_config, continuous_batching_config, workload_hints
        if model.config._attn_implementation not in _NAMES or not _keeps_states(model):
            return theirs(self, model, *given)
        options = batches().batch_options(model, *given)
        theirs(self, model, *given)
        batches().run_by_engine(self, options)
        return None

    return init


def _switching(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def switch(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        name = model.config._attn_implementation
        if name not in _NAMES:
            return theirs(self, model, *args, **kwargs)
        if _keeps_states(model):  # the engine switches it, and back
            return None
        _require_batchable(model)
        if name == "torchpaged":
            model.set_attn_implementation(BATCH_NAME)
            self._original_attn_impl = name  # the manager sets it back when it stops
        return None

    switch._torchpaged = True  # type: ignore[attr-defined]
    return switch


def _updating(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs, updated=())  # whose marks include that compiled code leaves it out
    def update(
        self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **given: Any
    ) -> Any:
        options = given.get("kwargs")  # from 5.24 on: those of the layer's attention function, which may grow
        if options is None or self.config._attn_implementation not in (PAGED_NAME, BATCH_NAME):
            return theirs(self, key_states, value_states, layer_idx, *args, **given)
        options["cache"] = self
        return key_states, value_states

    return update


def _with_block_tables(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def ensure(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> Any:
        if config._attn_implementation not in _NAMES:
            return theirs(config, cb_config, *args, **kwargs)
        kinds = getattr(config, "layer_types", None)
        rings = "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None) is not None
        if rings:  # a ring of tokens has no block table
            cb_config.max_blocks_per_request = 0
        return None

    return ensure
