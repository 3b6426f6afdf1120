"""RowGroups: which rows of a `PagedCache` share blocks, so that its decode steps read these once.

Rows share blocks after `PagedCache.reorder_cache` (beams), ``batch_repeat_interleave`` and
``batch_select_indices``. Who shares what is found then, on the host, by the blocks' identity; it stays true
while rows grow. A compiled forward is traced once with groups and once without, for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchpaged.backends import AttentionSpec
from torchpaged.cascade import AutomaticPrefixes, CascadeBatch, CascadeCosts, SharedPrefixes
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.hf.cache_rows import CacheRows
from torchpaged.hf.layer import PagedLayer
from torchpaged.metadata import AttentionMetadata


class RowGroups:
    """The groups of one cache's rows.

    Args:
        rows: the rows.
        layers: the cache's paged layers: those that can read in groups do.
        cascade: True: where it pays by the device's own `CascadeCosts`; False: never; or those costs.

    Attributes:
        active: whether decode steps have groups.

    Raises:
        ArgumentError: another ``cascade``.
    """

    def __init__(self, rows: CacheRows, layers: Sequence[PagedLayer], cascade: bool | CascadeCosts) -> None:
        if not isinstance(cascade, (bool, CascadeCosts)):
            raise ArgumentError("cascade", "True, False or CascadeCosts", repr(cascade))
        self._rows, self._layers, self._cascade = rows, layers, cascade
        self._made_for: AttentionSpec | None = None
        self._prefixes: AutomaticPrefixes | None = None
        self._shared: SharedPrefixes | None = None
        self._own: tuple[Tensor, Tensor] | None = None  # tables and lengths of what no group has
        self.active = False

    def forget(self) -> None:
        """Rows are read one by one, until `find`."""
        self.active = False

    def find(self, lengths: Sequence[int]) -> None:
        """Find the groups of the rows as they are now.

        Args:
            lengths: tokens of each row without padding, of which forwards add more.
        """
        self.active = False
        prefixes = self._finder() if len(lengths) > 1 else None
        if prefixes is None:
            return
        rows, count = self._rows, len(lengths)
        behind = [length + 1 for length in lengths]  # with the next token
        shared = prefixes.update(count, count, rows.blocks.rows, [1] * count, behind)
        if shared is None:
            return
        if shared is not self._shared or self._own is None:
            with torch.inference_mode(False):
                self._own = (
                    torch.zeros_like(rows.block_table[:count]),
                    torch.zeros_like(rows.seq_lens[:count]),
                )
            for tensor in (*shared.tensors().values(), *self._own):
                torch._dynamo.mark_static_address(tensor, guard=False)
            self._shared = shared
        self.active = True

    def _finder(self) -> AutomaticPrefixes | None:
        """Made for the first layer that can read in groups; None if none can."""
        able = [layer.spec for layer in self._layers if layer.reads_in_groups and layer.spec is not None]
        if self._cascade is False or not able:
            return None
        spec = able[0]
        if spec != self._made_for:
            self._made_for, rows = spec, self._rows
            self._prefixes = AutomaticPrefixes(
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                head_dim_v=spec.head_dim_v,
                kv_dtype=spec.kv_dtype or spec.dtype,
                max_blocks_per_req=rows.blocks_per_row,
                block_size=rows.block_size,
                device=spec.device,
                costs=None if self._cascade is True else self._cascade,
            )
        return self._prefixes

    def advance(self, query_len: int) -> None:
        """The lengths moved on by ``query_len`` tokens per row: what of each row no group has, for all layers
        of the forward; in the graph."""
        if self.active and query_len == 1:
            assert self._shared is not None and self._own is not None
            count = self._own[1].shape[0]
            now = self._shared.suffix(self._rows.block_table[:count], self._rows.seq_lens[:count])
            for kept, new in zip(self._own, now, strict=True):
                kept.copy_(new)

    def of(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """The forward's batch with its groups; as it is, if it is no decode step or has none."""
        if not self.active or metadata.max_query_len != 1:
            return metadata
        assert self._shared is not None and self._own is not None
        return replace(metadata, prefixes=CascadeBatch(self._shared, *self._own))
