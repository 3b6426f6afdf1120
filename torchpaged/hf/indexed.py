"""Models that select the keys of each query by an indexer of their own (DeepSeek sparse attention): their
caches gather, and keep the indexer's keys in blocks beside keys and values.

transformers' modules score every cached indexer key against a query, and hand the positions of the best ones
to the attention function, which masks all others. No kernel here reads only the selected keys: nothing is
saved but what the model itself saves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.layer import SET_UP, PagedLayer, PagedOwner


class IndexedLayer(PagedLayer):
    """A layer whose indexer caches one key per token, in blocks of its own in the rows' slots."""

    def __init__(self, owner: PagedOwner, index: int, window: int | None = None) -> None:
        super().__init__(owner, index, window)
        self.index_pool: Tensor | None = None  # [num_blocks, block_size, 1, index_head_dim]

    @torch.compiler.disable(reason=SET_UP)
    def _make_index_pool(self, states: Tensor) -> None:
        shape = (self.owner.num_blocks_of(self), self.owner.block_size, 1, states.shape[-1])
        with torch.inference_mode(False):
            self.index_pool = torch.zeros(shape, dtype=states.dtype, device=states.device)
        torch._dynamo.mark_static_address(self.index_pool, guard=False)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the indexer's keys of this forward's tokens, ``[batch, query_len, index_head_dim]``, and give
        those of all, ``[batch, max_seq_len, index_head_dim]``; `update` has moved the lengths on."""
        if self.index_pool is None:
            self._make_index_pool(indexer_key_states)
        pool = self.index_pool
        assert pool is not None
        batch, query_len, width = indexer_key_states.shape
        rows: Any = self.owner.rows
        # Padding has slot -1: it goes into the null block, which nothing reads.
        slots = rows.slots(batch, query_len).clamp_min(0)
        pool.view(-1, width).index_put_((slots,), indexer_key_states.reshape(-1, width))
        return self.owner.gather(pool, batch)[:, 0]

    def copy_blocks(self, block_mapping: Tensor) -> None:
        """See `PagedLayer`; the indexer's keys too."""
        super().copy_blocks(block_mapping)
        if self.index_pool is not None:
            source, destination = block_mapping.to(self.index_pool.device).unbind(1)
            self.index_pool[destination] = self.index_pool[source]

    def count_bytes(self) -> int:
        """See `PagedLayer`; the indexer's keys too."""
        return super().count_bytes() + (0 if self.index_pool is None else self.index_pool.nbytes)


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


def attend_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    sinks: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention over gathered keys with sink logits, which SDPA drops.

    Args:
        query: ``[batch, num_heads, query_len, head_dim]``.
        key, value: ``[batch, num_kv_heads, kv_len, head_dim(_v)]``.
        mask: ``[batch, 1, query_len, kv_len]``, bool (true = seen) or additive.
        scale: of the scores.
        sinks: ``[num_heads]``, or one of each query, ``[batch, num_heads, query_len, 1]``.
        bias: added to the scaled scores, ``[batch or 1, num_heads or 1, query_len, kv_len]``.

    Returns:
        ``[batch, query_len, num_heads, head_dim_v]``.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        mask = zeros.masked_fill(~mask, torch.finfo(torch.float32).min)
    scores = (query @ key.mT).float() * scale + (mask if bias is None else mask + bias)
    sinks = sinks[None, :, None, None] if sinks.dim() == 1 else sinks
    more = torch.cat((scores, sinks.float().expand(*scores.shape[:3], 1)), -1)
    weights = F.softmax(more, dim=-1)[..., :-1]
    return (weights.to(value.dtype) @ value).transpose(1, 2)
