"""What a model's layers store, found by running it once, and how much a `torchpaged.hf.PagedModel` keeps:
blocks, requests with rings or states, and their checkpoints."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from torchpaged.backends import Limits
from torchpaged.cache import LayerSpec, PagedKVCache, RollingBlocks
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.packed_mixers import pack_mixers
from torchpaged.hf.step_cache import StepCache
from torchpaged.hf.step_rings import StepRings

_MOST_CHECKPOINTS = 64  # where no number is given


def most_blocks(limits: Limits) -> int:
    """Blocks that the largest batch takes, and the null block."""
    reqs, columns = limits.need("max_num_reqs", "max_blocks_per_req")
    return reqs * columns + 1


def most_requests(limits: Limits) -> int:
    """Requests at once, which have rings or states."""
    if limits.max_num_reqs is None:
        raise ArgumentError(
            "limits",
            "max_num_reqs, for a model whose layers keep a state per request",
            repr(limits),
            "give limits=Limits(max_num_reqs=...)",
        )
    return limits.max_num_reqs


def bytes_of_request(
    specs: Sequence[LayerSpec], rolling: RollingBlocks | None, block_size: int, dtype: torch.dtype
) -> int:
    """Of a ring and a state, in these layers."""
    ring = 0 if rolling is None else rolling.blocks_per_ring
    return sum((1 if spec.per_request else ring) * spec.bytes_per_block(block_size, dtype) for spec in specs)


def num_checkpoints_for(limits: Limits, rolling: RollingBlocks | None, fitting: int | None) -> int:
    """Copies where no number is given, see `PagedModel`; ``fitting``: that the memory for all pools holds."""
    requests = most_requests(limits)
    most = min(requests, _MOST_CHECKPOINTS)
    if fitting is not None:
        most = min(most, fitting // 8)
    if rolling is not None:
        every_token = requests * limits.need("max_blocks_per_req")[0]
        most = min(most, every_token // rolling.blocks_per_ring - requests)
    return most


class Room(NamedTuple):
    """What a `torchpaged.hf.PagedModel` is asked to keep; its arguments of these names."""

    block_size: int
    num_blocks: int | None
    memory_budget: int | None
    num_checkpoints: int | None


def make_pools(
    probed: StepCache, limits: Limits, rolling: RollingBlocks | None, room: Room, device: torch.device
) -> tuple[PagedKVCache, StepRings | None]:
    """The pools of the layers of ``probed``, and what requests keep besides blocks, if any layer has rings or
    states. ``rolling``: of the layers that roll; gets rings for the checkpoints.

    Raises:
        ArgumentError: the memory holds no rings and states for the requests of ``limits``.
    """
    num_blocks, budget = room.num_blocks, room.memory_budget
    specs = [layer.stored for layer in probed.keeping]
    rolls = [] if rolling is None else [n for n, layer in enumerate(probed.keeping) if layer.rolls]
    dtype = (probed.paged[0].keys if probed.paged else probed.states[0].pools.conv_state).dtype
    own = [spec for n, spec in enumerate(specs) if spec.per_request or n in rolls]
    copies = room.num_checkpoints
    if copies is None:
        each = bytes_of_request(own, rolling, room.block_size, dtype)
        fitting = None if budget is None else budget // max(each, 1)
        copies = num_checkpoints_for(limits, rolling, fitting) if own else 0
    if rolling is not None:
        rolling.num_rings += copies
    if len(own) == len(specs) and num_blocks is None:
        num_blocks, budget = most_blocks(limits), None  # of no layer
    pools = PagedKVCache(
        specs,
        block_size=room.block_size,
        num_blocks=num_blocks,
        memory_budget=budget,
        dtype=dtype,
        device=device,
        blocks_of={} if rolling is None else dict.fromkeys(rolls, rolling.num_blocks),
        max_num_reqs=most_requests(limits) + copies if probed.states else None,
    )
    if room.memory_budget is not None and pools.num_bytes > room.memory_budget:
        raise ArgumentError(
            "memory_budget",
            f"at least {pools.num_bytes} bytes, for the rings and states of {most_requests(limits)} "
            f"requests and {copies} checkpoints",
            str(room.memory_budget),
        )
    if rolling is None and not probed.states:
        return pools, None
    return pools, StepRings(most_requests(limits), rolling, pools, copies)


def probe(
    model: PreTrainedModel, config: Any, block_size: int, kv_dtype: torch.dtype | None = None
) -> StepCache:
    """A cache that knows what each layer stores, and what the layers ask of a backend.

    Found by one padding token: exact for any architecture, whatever its config calls things. The reference
    takes every attention.
    """
    limits = Limits(1, 1, 1, num_blocks=2, block_size=block_size)
    cache = StepCache(config, limits, block_size, "reference", kv_dtype)
    pack_mixers(model, cache.states)
    with torch.no_grad():
        cache.run(model, *cache.padding_step(model.device))
    missing = [i for i, layer in enumerate(cache.keeping) if not layer.is_initialized]
    if missing:
        raise UnsupportedModelError(f"{type(model).__name__}: layers {missing} never wrote to the cache")
    windows = {layer.window for layer in cache.paged} - {None}
    if windows and cache.masks.causal and not cache.masks.local:
        raise UnsupportedModelError(
            f"{type(model).__name__}: its config gives layers a window of {sorted(windows)} tokens, and it "
            "asks for no mask of a window, so that its own caches and its own forwards disagree; set "
            "model.config.sliding_window = None (and its layer_types) if it has none"
        )
    return cache
