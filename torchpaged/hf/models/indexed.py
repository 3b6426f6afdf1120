"""Models that select the keys of each query by an indexer of their own (DeepSeek sparse attention). Attached
ones keep latents and read those that are selected: sparse.py. The caches of others gather, and keep the
indexer's keys in blocks besides keys and values.

There transformers' modules score every cached indexer key against a query, and hand the positions of the best
ones to the attention function, which masks all others: nothing is saved but what the model itself saves.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticIndexedLayer

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.attached import was_given_functions
from torchpaged.hf.families import Family, register_family
from torchpaged.hf.layer import SET_UP, PagedLayer
from torchpaged.hf.models import sparse
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.template import window_and_chunk


class IndexedLayer(PagedLayer):
    """A layer whose indexer caches one key per token, in blocks of its own in the rows' slots."""

    def __init__(self, owner: PagedOwner, index: int, window: int | None = None) -> None:
        super().__init__(owner, index, window)
        self.index_pool: Tensor | None = None  # [num_blocks, block_size, 1, index_head_dim]

    @torch.compiler.disable(reason=SET_UP)
    def _make_index_pool(self, states: Tensor) -> None:
        assert self.keys is not None
        shape = (*self.keys.shape[:2], 1, states.shape[-1])
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
        slots = rows.step(batch, query_len, writes=True).slot_mapping.clamp_min(0)
        pool.view(-1, width).index_put_((slots,), indexer_key_states.reshape(-1, width))
        gathered: Tensor = rows.gather(pool, batch)[:, 0]
        return gathered

    def copy_blocks(self, block_mapping: Tensor) -> None:
        """See `PagedLayer`; the indexer's keys too."""
        super().copy_blocks(block_mapping)
        if self.index_pool is not None:
            source, destination = block_mapping.to(self.index_pool.device).unbind(1)
            self.index_pool[destination] = self.index_pool[source]

    def count_bytes(self) -> int:
        """See `PagedLayer`; the indexer's keys too."""
        return super().count_bytes() + (0 if self.index_pool is None else self.index_pool.nbytes)


def _layer(owner: Any, index: int, config: Any, template: Any) -> Any:
    """The layers with an indexer: of a cache that gathers, or, for an attached model, of latents."""
    if not isinstance(template, StaticIndexedLayer):
        return None
    if owner.dense:
        return IndexedLayer(owner, index, window_and_chunk(config, index, template)[0])
    if config.model_type in sparse.TYPES and was_given_functions(config):
        return sparse.layer(owner, index, config)
    attach = "call torchpaged.hf.attach(model), or " if config.model_type in sparse.TYPES else ""
    raise UnsupportedModelError(
        f"{config.model_type}: layer {index} caches an indexer (sparse attention), which is not paged; "
        f"{attach}use PagedCache(..., dense=True)"
    )


_SELECTS = "selects the keys of each query by an indexer"
register_family(Family(("dots3_note_text",), needs_dense=_SELECTS, layer=_layer))
register_family(
    Family(
        sparse.TYPES,
        needs_dense=f"{_SELECTS}; torchpaged.hf.attach(model) makes it attend over latents that are selected",
        takes_no_none=True,
        functions=sparse.functions,
        layer=_layer,
    )
)
