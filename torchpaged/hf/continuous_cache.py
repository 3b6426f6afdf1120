"""transformers' cache of continuous batching, of either version, as pools and block tables.

layer = layer_of(module, cache)
step = step_of(cache, layer, starts, num_tokens, longest, kwargs)   # None: `gathered` has the keys
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchpaged.custom_ops.checks import reads_values
from torchpaged.custom_ops.errors import ArgumentError


class BatchLayer(NamedTuple):
    """One layer's place in transformers' cache. Its index i lies in block ``i // rows_per_block``."""

    group: int
    kind: str  # "full_attention" or "sliding_attention"
    k_pool: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], strided
    v_pool: Tensor
    rows_per_block: int
    window: int | None


class BatchStep(NamedTuple):
    """What the layers of a group share in one step."""

    block_table: Tensor
    seq_lens: Tensor
    slots: Tensor


def layer_of(module: nn.Module, cache: Any) -> BatchLayer:
    """The layer's place in ``cache``.

    Raises:
        ArgumentError: there is no cache.
    """
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
        return BatchLayer(
            allocator.index, allocator.layer_type, k_pages[::every], v_pages[::every], rows, window
        )
    group, place = cache.layer_index_to_group_indices[index]  # transformers 5.17
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    pools = cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)
    window = cache.sliding_windows[index]
    if window == 1:  # transformers' mark of full attention
        return BatchLayer(group, "full_attention", *pools, cache.block_size, None)
    return BatchLayer(group, "sliding_attention", *pools, cache.block_size, window)


def keys_of_kind(kwargs: dict[str, Any], kind: str) -> tuple[Tensor, int]:
    """``[num_reqs + 1]`` int32 starts of the keys of that kind of layer, and an upper bound of their
    number."""
    ends = kwargs["cu_seq_lens_k"]
    longest = kwargs["max_length_k"] if "max_length_k" in kwargs else kwargs["max_seqlen_k"]
    if isinstance(ends, dict):
        return ends[kind], longest[kind]
    return ends, longest


def step_of(
    cache: Any, layer: BatchLayer, starts: Tensor, num_tokens: int, longest: int, kwargs: dict[str, Any]
) -> BatchStep | None:
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


def _once_per_step(
    cache: Any, layer: BatchLayer, kwargs: dict[str, Any], make: Callable[[], BatchStep]
) -> BatchStep:
    """Table, lengths and slots of the layer's group.

    They are kept next to the step's own list of indices, which transformers makes anew for every step. What
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
    steps: dict[int, BatchStep] = kept[2]
    if layer.group not in steps:
        steps[layer.group] = make()
    return steps[layer.group]


def _decode_step(layer: BatchLayer, num_tokens: int, kwargs: dict[str, Any]) -> BatchStep:
    """A step of one token per request, for which transformers fills a block table, in pages of all layers."""
    block_size = layer.k_pool.shape[1]
    lens = keys_of_kind(kwargs, layer.kind)[0].diff()
    table = kwargs["block_table"][layer.group] // (layer.rows_per_block // block_size)
    last = lens - 1
    block = table.gather(1, (last.clamp(min=0) // block_size)[:, None].long())[:, 0].long()
    slots = torch.where(lens > 0, block * block_size + last % block_size, -1)
    return BatchStep(table, lens, F.pad(slots, [0, num_tokens - slots.shape[0]], value=-1))


def _index_step(layer: BatchLayer, starts: Tensor, kwargs: dict[str, Any]) -> BatchStep:
    """The block table out of token indices: the first token of each of a request's blocks tells the block.

    Without keys of earlier steps transformers sends no indices to read, and those to write name them all.
    """
    ends, max_len = keys_of_kind(kwargs, layer.kind)
    read, write = kwargs["read_index"][layer.group], kwargs["write_index"][layer.group]
    block_size = layer.k_pool.shape[1]
    index, first = (read, ends[:-1]) if read.numel() else (write, starts[:-1])
    columns = torch.arange(0, max(max_len, 1), block_size, device=index.device)
    at = (first[:, None] + columns).clamp(max=index.shape[0] - 1)
    table = (index[at] // layer.rows_per_block).to(torch.int32)
    return BatchStep(table, ends.diff(), _slots(layer, write, starts))


def _slots(layer: BatchLayer, write: Tensor, starts: Tensor) -> Tensor:
    """The slots of the indices to write."""
    rows, page = layer.rows_per_block, layer.k_pool.shape[1]
    slots = write if rows == page else write // rows * page + write % rows
    if reads_values(slots.device):  # padding of one place for all, which a check would refuse
        slots = torch.where(torch.arange(slots.shape[0], device=slots.device) < starts[-1], slots, -1)
    return slots


def _ring_step(layer: BatchLayer, window: int, starts: Tensor, kwargs: dict[str, Any]) -> BatchStep:
    """A step of one token per request, in a ring of ``window`` tokens: its pages as a block table, in
    whatever order, and how many tokens there will be.

    Indices to read name the tokens before this one, the oldest first, and then a place for this one. So in a
    ring that is not full its page k begins with token ``k * page``; in a full one with the token that stands
    as far behind the oldest as that is from the next page.
    """
    ends, _ = keys_of_kind(kwargs, layer.kind)
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
    return BatchStep((table // rows).to(torch.int32), lens, _slots(layer, write, starts))


def gathered(
    cache: Any, index: Any, layer: BatchLayer, k: Tensor, v: Tensor, kwargs: dict[str, Any]
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
