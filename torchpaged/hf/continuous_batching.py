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

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    PagedAttentionCache,
    initialization,
)

from torchpaged.compat.dense import packed_pools
from torchpaged.custom_ops.checks import reads_values
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.functional import paged_attention, write_kv
from torchpaged.hf.families import family_of
from torchpaged.hf.packed_mixers import mixers_of
from torchpaged.hf.support import has_own_attention

#: What a user asks for, with transformers 5.17; 5.23 strips the prefix, so that "torchpaged" is left.
PAGED_NAME = "paged|torchpaged"
#: What a model runs as inside ``generate_batch`` where the prefix is stripped. No mask function has this
#: name: transformers makes no mask then.
BATCH_NAME = "torchpaged_continuous_batching"
_NAMES = ("torchpaged", PAGED_NAME, BATCH_NAME)


class _Layer(NamedTuple):
    """One layer's place in transformers' cache. Its index i lies in block ``i // rows_per_block``."""

    group: int
    kind: str  # "full_attention" or "sliding_attention"
    k_pool: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], strided
    v_pool: Tensor
    rows_per_block: int
    window: int | None


class _Step(NamedTuple):
    """What the layers of a group share in one step."""

    block_table: Tensor
    seq_lens: Tensor
    slots: Tensor


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
        query: ``[1, num_heads, num_tokens, head_dim]``, requests one behind the other.
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
    layer = _layer_of(module, cache)
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
    step = _step_of(cache, layer, starts, q.shape[0], longest, kwargs)
    if step is not None:
        own = layer.k_pool, layer.v_pool
        write_kv(k, v, *own, step.slots)
        # All keys that are in a ring are in the window; rotated keys have no order.
        out = paged_attention(q, *own, step.block_table, step.seq_lens, starts, **options)
    else:
        assert layer.window is not None
        keys, values = _gathered(cache, module.layer_idx, layer, k, v, kwargs)
        ends, max_len = _of_kind(kwargs, layer.kind)
        pools = packed_pools(keys, values, ends[:-1], max_len)
        window = (layer.window - 1, -1)
        out = paged_attention(q, *pools, ends.diff(), starts, window_size=window, **options)
    return out[None, :, :, :width], None


def _layer_of(module: nn.Module, cache: Any) -> _Layer:
    if cache is None:
        raise ArgumentError(
            "cache",
            "the cache of continuous batching",
            "None",
            "call model.generate_batch, for models that hand their keywords on to their attention; for "
            "generate and forward use the name 'torchpaged'",
        )
    index: Any = module.layer_idx
    if hasattr(cache, "layer_to_allocator"):  # transformers 5.23
        allocator = cache.layer_to_allocator[index]
        # Views of one tensor, in which pages of all layers alternate; every n-th is the layer's own.
        k_pages, v_pages = allocator._kv_page_views[index]  # private: a ring has no get_cache_for_block_table
        rows, page = allocator.block_physical_stride, allocator.tokens_per_page
        every = rows // page
        window = getattr(allocator, "sliding_window", None)
        return _Layer(allocator.index, allocator.layer_type, k_pages[::every], v_pages[::every], rows, window)
    group, place = cache.layer_index_to_group_indices[index]  # transformers 5.17
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    pools = cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)
    window = cache.sliding_windows[index]
    if window == 1:  # transformers' mark of full attention
        return _Layer(group, "full_attention", *pools, cache.block_size, None)
    return _Layer(group, "sliding_attention", *pools, cache.block_size, window)


def _refuse(
    module: nn.Module,
    layer: _Layer,
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


def _of_kind(kwargs: dict[str, Any], kind: str) -> tuple[Tensor, int]:
    """``[num_reqs + 1]`` int32 starts of the keys of that kind of layer, and an upper bound of their
    number."""
    ends = kwargs["cu_seq_lens_k"]
    longest = kwargs["max_length_k"] if "max_length_k" in kwargs else kwargs["max_seqlen_k"]
    if isinstance(ends, dict):
        return ends[kind], longest[kind]
    return ends, longest


def _step_of(
    cache: Any, layer: _Layer, starts: Tensor, num_tokens: int, longest: int, kwargs: dict[str, Any]
) -> _Step | None:
    """What the layers of a group share, by the first one of each step; None where keys must be gathered: of a
    ring in a step with prompts, and of one whose pages are no block table: one page of several is not full,
    or transformers sends no indices to read."""
    window = layer.window
    if window is not None:
        page, read = layer.k_pool.shape[1], kwargs["read_index"][layer.group]
        if longest > 1 or (window > page and window % page) or not read.numel():
            return None
        return _once_per_step(cache, layer, kwargs, lambda: _ring_step(layer, window, starts, kwargs))
    if kwargs.get("block_table") is not None:
        return _once_per_step(cache, layer, kwargs, lambda: _decode_step(layer, num_tokens, kwargs))
    return _once_per_step(cache, layer, kwargs, lambda: _index_step(layer, starts, kwargs))


def _once_per_step(cache: Any, layer: _Layer, kwargs: dict[str, Any], make: Callable[[], _Step]) -> _Step:
    """Table, lengths and slots of the layer's group.

    They are kept beside the step's own list of indices, which transformers makes anew for every step. What
    a graph captures is made within it: a replay must make it again. A trace keeps nothing.
    """
    if torch.compiler.is_compiling():
        return make()
    indices = kwargs["write_index"]
    captured = indices[0].is_cuda and torch.cuda.is_current_stream_capturing()
    kept = getattr(cache, "_torchpaged_steps", None)
    if kept is None or kept[0] is not indices or kept[1] != captured:
        kept = (indices, captured, {})
        cache._torchpaged_steps = kept
    steps: dict[int, _Step] = kept[2]
    if layer.group not in steps:
        steps[layer.group] = make()
    return steps[layer.group]


def _decode_step(layer: _Layer, num_tokens: int, kwargs: dict[str, Any]) -> _Step:
    """A step of one token per request, for which transformers fills a block table, in pages of all layers."""
    block_size = layer.k_pool.shape[1]
    lens = _of_kind(kwargs, layer.kind)[0].diff()
    table = kwargs["block_table"][layer.group] // (layer.rows_per_block // block_size)
    last = lens - 1
    block = table.gather(1, (last.clamp(min=0) // block_size)[:, None].long())[:, 0].long()
    slots = torch.where(lens > 0, block * block_size + last % block_size, -1)
    return _Step(table, lens, F.pad(slots, [0, num_tokens - slots.shape[0]], value=-1))


def _index_step(layer: _Layer, starts: Tensor, kwargs: dict[str, Any]) -> _Step:
    """The block table out of token indices: the first token of each of a request's blocks tells the block.

    Without keys of earlier steps transformers sends no indices to read, and those to write name them all.
    """
    ends, max_len = _of_kind(kwargs, layer.kind)
    read, write = kwargs["read_index"][layer.group], kwargs["write_index"][layer.group]
    block_size = layer.k_pool.shape[1]
    index, first = (read, ends[:-1]) if read.numel() else (write, starts[:-1])
    columns = torch.arange(0, max(max_len, 1), block_size, device=index.device)
    at = (first[:, None] + columns).clamp(max=index.shape[0] - 1)
    table = (index[at] // layer.rows_per_block).to(torch.int32)
    return _Step(table, ends.diff(), _slots(layer, write, starts))


def _slots(layer: _Layer, write: Tensor, starts: Tensor) -> Tensor:
    """The slots of the indices to write."""
    rows, page = layer.rows_per_block, layer.k_pool.shape[1]
    slots = write if rows == page else write // rows * page + write % rows
    if reads_values(slots.device):  # padding of one place for all, which a check would refuse
        slots = torch.where(torch.arange(slots.shape[0], device=slots.device) < starts[-1], slots, -1)
    return slots


def _ring_step(layer: _Layer, window: int, starts: Tensor, kwargs: dict[str, Any]) -> _Step:
    """A step of one token per request, in a ring of ``window`` tokens: its pages as a block table, in
    whatever order, and how many tokens there will be.

    Indices to read name the tokens before this one, the oldest first, and then a place for this one. So in a
    ring that is not full its page k begins with token ``k * page``; in a full one with the token that stands
    as far behind the oldest as that is from the next page.
    """
    ends, _ = _of_kind(kwargs, layer.kind)
    read, write = kwargs["read_index"][layer.group], kwargs["write_index"][layer.group]
    rows, page, lens = layer.rows_per_block, layer.k_pool.shape[1], ends.diff()
    own = write[starts[:-1].clamp(max=write.shape[0] - 1)]
    if window <= page:
        table = own[:, None]
    else:
        offset = torch.where(lens == window, page - 1 - own % rows, 0)
        token = offset[:, None] + torch.arange(0, window, page, device=own.device)
        at = (ends[:-1, None] + token).clamp(max=read.shape[0] - 1)
        table = torch.where(token >= lens[:, None] - 1, own[:, None], read[at])
    return _Step((table // rows).to(torch.int32), lens, _slots(layer, write, starts))


def _gathered(
    cache: Any, index: Any, layer: _Layer, k: Tensor, v: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """``[total_k, num_kv_heads, head_dim]`` twice: the keys and values in the ring and the new ones, which
    are stored in it."""
    if hasattr(cache, "layer_to_allocator"):  # transformers 5.23
        read, write = kwargs["read_index"][layer.group], kwargs["write_index"][layer.group]
        keys, values = cache.layer_to_allocator[index].update(k, v, index, read, write)
    else:
        rows = (x.transpose(0, 1)[None] for x in (k, v))
        indices = {name: kwargs[name] for name in ("read_index", "write_index")}
        keys, values = cache.update(*rows, layer_idx=index, **indices)
    return keys, values


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
    """Refuse models to which transformers' continuous batching gives wrong tokens, whatever attends.

    Raises:
        UnsupportedModelError: with the reason.
    """
    name, model_type = type(model).__name__, getattr(model.config, "model_type", "")
    if has_own_attention(model_type):
        raise UnsupportedModelError(f"{name} has attention of its own, which knows no paged cache")
    why = family_of(model_type).needs_dense
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
