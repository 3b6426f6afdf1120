"""What a `PagedCache` needs for layers that keep a state per row (`torchpaged.hf.packed_state`): their slots,
and what its backend is chosen by where such a layer comes before all attention."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.words import counted, of_bytes
from torchpaged.hf.packed_state import PackedState


def slots_of_rows(max_rows: int, device: torch.device) -> Tensor:
    """``[max_rows]`` int32: row ``i`` has slot ``i + 1`` in every layer; slot 0 belongs to none."""
    with torch.inference_mode(False):
        slots = torch.arange(1, max_rows + 1, dtype=torch.int32, device=device)
    torch._dynamo.mark_static_address(slots, guard=False)  # guard=False: a new cache must not recompile
    return slots


def keys_like(config: Any, x: Tensor) -> Tensor:
    """What a text config says of the keys of tokens ``x [batch, query_len, *]``: no values, but their shape
    ``[batch, num_kv_heads, query_len, head_dim]``, dtype and device. Of a model without attention one head
    of 64, for a choice by dtype and device."""
    num_heads, head_dim = 1, 64
    if getattr(config, "num_attention_heads", None):
        num_heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return x.new_empty(()).expand(x.shape[0], num_heads, x.shape[1], head_dim)


def describe_states(states: Sequence[PackedState]) -> list[str]:
    """Of a cache's states: of how many layers, and their memory; empty where there are none."""
    size = sum(layer.num_bytes for layer in states)
    text = f"{counted(len(states), 'layer')} with a state per row, "
    return [text + (of_bytes(size) if size else "made with the first tokens")] if states else []
