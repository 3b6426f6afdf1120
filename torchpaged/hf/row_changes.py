"""What generate() does to the rows of a paged cache between forwards: take tokens back, reorder, repeat,
select.

`PagedCache` holds it: transformers looks for these methods on the cache itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from torchpaged.custom_ops.checks import is_int
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.hf.cache_rows import CacheRows
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.state_layer import StateLayer
from torchpaged.prefixes.rows import RowPrefixes


class RowChanges:
    """Changes of the rows of one cache.

    Args:
        rows: the cache's rows.
        layers: all of the cache's layers, of which a `StateLayer` keeps states of the rows besides blocks.
        prefixes: of the rows.
    """

    def __init__(self, rows: CacheRows, layers: Sequence[Any], prefixes: RowPrefixes) -> None:
        self._rows, self._layers, self._prefixes = rows, layers, prefixes

    def crop(self, tokens_to_remove: int) -> None:
        """`PagedCache.crop`."""
        try:
            count = -operator.index(tokens_to_remove)
        except (TypeError, ValueError):
            raise ArgumentError(
                "tokens_to_remove", "an integer of at most 0", repr(tokens_to_remove)
            ) from None
        if count < 0:
            raise ArgumentError(
                "tokens_to_remove",
                "0, or the number of tokens to take back with a minus",
                str(-count),
                "cache.crop(-n) takes back n tokens",
            )
        rows = self._rows
        if rows.ready:
            rows.require_complete()
            count = min(count, int(rows.total))
            if count and rows.rolling is not None:
                rows.rolling.require_kept(rows.lengths(), int(rows.total), count)
            if count:
                self._unshare(count)
        for layer in self._layers:
            if hasattr(layer, "crop"):
                layer.crop(-count)  # a recurrent state may refuse: before the rows change
        if count and rows.ready:
            rows.take_back(count)

    def _unshare(self, count: int) -> None:
        """Give every row blocks of its own from its last ``count`` tokens on."""
        rows = self._rows
        kept = [max(length - count, 0) for length in rows.lengths()]
        copies = rows.blocks.unshare(kept)
        if copies is not None:
            rows.upload()
            self._copy_blocks(copies)
            self._prefixes.find(kept)

    def reindex(self, parents: Sequence[int]) -> None:
        """New row ``i`` is a fork of old row ``parents[i]``, see `RowBlocks.reindex`. Nothing to do for rows
        that hold nothing, as in transformers' caches.

        Raises:
            ArgumentError: rows that there are not, none at all, or more than there is room for; a forward
                before that did not complete. Nothing is changed then.
            BlockPoolExhaustedError: there are too few blocks; nothing is changed then.
        """
        rows = self._rows
        rows.require_complete()
        if not rows.ready:
            return
        num_rows = len(rows.blocks)
        if not parents or not all(is_int(parent) and 0 <= parent < num_rows for parent in parents):
            raise ArgumentError(
                "rows",
                f"row numbers from 0 to {num_rows - 1}, one at least",
                str(list(parents)),
                "of a mask give mask.nonzero().flatten()",
            )
        if len(parents) > rows.max_rows:
            raise ArgumentError(
                "max_batch_size",
                f"at least {len(parents)} rows",
                str(rows.max_rows),
                "build a larger PagedCache",
            )
        if list(parents) == list(range(len(rows.blocks))):
            return
        lengths = rows.lengths()
        self._prefixes.forget()
        copies = rows.blocks.reindex(parents, lengths)
        in_rings = [] if rows.rolling is None else rows.rolling.blocks.reindex(parents, lengths)
        rows.select(parents)
        self._copy_blocks(copies)
        self._copy_blocks(in_rings, rolls=True)
        for layer in self._layers:
            if isinstance(layer, StateLayer):
                layer.reorder_cache(torch.tensor(parents, dtype=torch.int64, device="cpu"))
        self._prefixes.find([lengths[parent] for parent in parents])

    def _copy_blocks(self, copies: Sequence[tuple[int, int]], rolls: bool = False) -> None:
        """``(source, destination)`` pairs in the pools of every layer that ``rolls``, or does not."""
        if copies:
            mapping = torch.tensor(copies, dtype=torch.int64, device=self._rows.seq_lens.device)
            for layer in self._layers:
                if isinstance(layer, PagedLayer) and layer.rolls == rolls:
                    layer.copy_blocks(mapping)
