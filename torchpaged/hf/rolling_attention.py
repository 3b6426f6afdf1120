"""Layers with a window, whose blocks are rings: which ones, and forwards of more tokens than a ring takes at
once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchpaged.backends import Limits
from torchpaged.cache import RollingBlocks
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.call import LayerCall, Requests
from torchpaged.hf.layer import PagedLayer

#: New tokens of a row that a rolling layer takes at once, where no number is given.
DEFAULT_STEP = 512


def reach_of(layer: PagedLayer) -> int | None:
    """Tokens that a query of ``layer`` sees at most, its own one included; None: all."""
    return layer.chunk if layer.window is None else layer.window


def choose_rolling(
    config: Any, layers: Sequence[PagedLayer], step: int, limits: Limits
) -> RollingBlocks | None:
    """Say of each layer whether it rolls: where that takes fewer blocks, unless other layers read its keys.

    Args:
        config: the model's text config.
        layers: those that could; ``rolls`` of each is set.
        step: new tokens of a row at once.
        limits: of the cache otherwise.

    Returns:
        The rings that they share, of the widest window among them; None if no layer rolls.
    """
    names = ("max_num_reqs", "max_blocks_per_req", "num_blocks", "block_size")
    max_rows, blocks_per_row, num_blocks, block_size = limits.need(*names)
    candidates = [layer for layer in layers if reach_of(layer) is not None]
    if getattr(config, "num_kv_shared_layers", 0):  # the last one of each kind is read by layers behind it
        last = {(layer.window, layer.chunk): layer for layer in candidates}
        candidates = [layer for layer in candidates if layer not in last.values()]
    rings = {layer: RollingBlocks(reach_of(layer) or 1, step, block_size, max_rows) for layer in candidates}
    for layer, ring in rings.items():
        layer.rolls = ring.blocks_per_ring < blocks_per_row and ring.num_blocks < num_blocks
    chosen = [ring for layer, ring in rings.items() if layer.rolls]
    return max(chosen, key=lambda ring: ring.window, default=None)


def require_kept(layer: PagedLayer, call: LayerCall) -> None:
    """Refuse attention that sees more than a rolling layer keeps.

    Raises:
        UnsupportedModelError: a wider window than the cache knows of, none at all, or keys ahead of a query.
    """
    reach = reach_of(layer)
    seen = layer.chunk if call.window is None else call.window
    if call.causal and reach is not None and seen is not None and seen <= reach:
        return
    sees = "no window" if seen is None else f"a window of {seen}"
    raise UnsupportedModelError(
        f"{type(call.module).__name__}: layer {layer.index} keeps what a window of {reach} tokens needs, and "
        f"attends {f'with {sees}' if call.causal else 'ahead of its tokens'}; build the PagedCache with "
        "sliding_step=max_seq_len"
    )


def attend_rolling(layer: PagedLayer, call: LayerCall) -> Tensor:
    """`PagedLayer.attend` of a rolling layer; a forward of more tokens than its ring takes at once is written
    and attended step by step.

    Raises:
        UnsupportedModelError: as `require_kept`; or another layer attends with this one's keys, step by step.
        BackendUnavailableError: the cache's backend declares not to run it.
    """
    require_kept(layer, call)
    batch, num_heads, query_len, _ = call.query.shape
    if layer.takes_at_once(query_len):
        return layer.attend(call)
    rows = layer.owner.rows
    assert rows is not None and rows.rolling is not None
    table, step, device = rows.rolling, rows.rolling.blocks.step, call.query.device
    parts = []
    for start in range(0, query_len, step):
        count = min(step, query_len - start)
        # In front of the write, which holds the attention back: it may not read them early.
        seq_lens = (rows.seq_lens[:batch] - (query_len - start - count)).clamp_min(0)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * count
        first = rows.seq_lens[:batch, None].long() - query_len + start
        slots = table.slots_of(first + torch.arange(count, device=device)[None])
        new = slice(start, start + count)
        requests = Requests(table.table[:batch], seq_lens, starts, count)
        made = call._replace(query=call.query[:, :, new]).over(requests, layer.own)
        layer.hold(made)
        if start == 0:  # nothing refuses any more: until here they stay, and with them the forward is open
            key, value = _taken(layer, query_len)
        layer.store(key[:, :, new], value[:, :, new], slots, are_query_tokens=False)
        layer.run(made)
        parts.append(made.out.view(batch, count, num_heads, made.out.shape[-1]))
    return torch.cat(parts, 1)


def _taken(layer: PagedLayer, query_len: int) -> tuple[Tensor, Tensor]:
    """The keys and values that a layer left to its attention."""
    states = layer.take_waiting()
    if states is None or states[0].shape[2] != query_len:
        raise UnsupportedModelError(
            f"{layer.owner.name}: two layers attend with the keys of layer {layer.index}, which keeps only "
            "what its window needs; build the PagedCache with sliding_step=max_seq_len"
        )
    return states
