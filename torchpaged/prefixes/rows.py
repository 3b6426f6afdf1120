"""RowPrefixes: which rows of a cache share blocks, so that its decode steps read these once.

    prefixes = RowPrefixes(rows, layers, cascade=True)
    prefixes.find(lengths)  # on the host, whenever rows came to share blocks
    prefixes.advance(1)  # in each forward, once its lengths have moved on; may be traced
    metadata = prefixes.prepare(metadata)  # for each layer of it

Which rows share what is found by the blocks' identity; it stays true while rows grow. A compiled forward is
traced once with groups and once without, for all of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from torchpaged.backends import AttentionSpec
from torchpaged.metadata import AttentionMetadata
from torchpaged.prefixes.automatic import AutomaticPrefixes
from torchpaged.prefixes.buffers import StepPrefixes
from torchpaged.prefixes.costs import CascadeCosts, check_cascade


class Rows(Protocol):
    """Rows of blocks whose tables and lengths move on in place.

    Attributes:
        blocks: has ``rows``, the blocks of each row, on the host.
        block_table: ``[max_rows, blocks_per_row]`` int32.
        seq_lens: ``[max_rows]`` int32.
    """

    blocks: Any
    block_table: Tensor
    seq_lens: Tensor
    block_size: int
    blocks_per_row: int


class RowPrefixes:
    """The groups of one cache's rows.

    Args:
        rows: the rows.
        layers: the cache's paged layers, whose ``spec`` says what each asks of attention, None until that is
            known, and ``reads_once`` whether it `can_read_once`: those that can do.
        cascade: True: where it pays by the device's own `CascadeCosts`; False: never; or those costs.

    Attributes:
        active: whether decode steps have groups.

    Raises:
        ArgumentError: another ``cascade``.
    """

    def __init__(self, rows: Rows, layers: Sequence[Any], cascade: bool | CascadeCosts) -> None:
        check_cascade(cascade)
        self._rows, self._layers, self._cascade = rows, layers, cascade
        self._made_for: AttentionSpec | None = None
        self._prefixes: AutomaticPrefixes | None = None
        self._step: StepPrefixes | None = None  # in tensors that stay where they are
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
        with_next = [length + 1 for length in lengths]
        shared = prefixes.update(count, count, rows.blocks.rows, [1] * count, with_next)
        if shared is None:
            return
        if self._step is None or shared is not self._step.shared:
            with torch.inference_mode(False):
                self._step = StepPrefixes(
                    shared,
                    torch.zeros_like(rows.block_table[:count]),
                    torch.zeros_like(rows.seq_lens[:count]),
                )
            for tensor in (*shared.tensors().values(), *self._step[1:]):
                torch._dynamo.mark_static_address(tensor, guard=False)
        self.active = True

    def _finder(self) -> AutomaticPrefixes | None:
        """Made for the first layer that can read prefixes once; None if none can."""
        specs = [layer.spec for layer in self._layers if layer.reads_once and layer.spec is not None]
        if self._cascade is False or not specs:
            return None
        if specs[0] != self._made_for:
            self._made_for, rows = specs[0], self._rows
            self._prefixes = AutomaticPrefixes.of_layer(
                specs[0], self._cascade, max_blocks_per_req=rows.blocks_per_row, block_size=rows.block_size
            )
        return self._prefixes

    def advance(self, query_len: int) -> None:
        """While `active`, the lengths moved on by ``query_len`` tokens per row: what of each row no group
        has, for all layers of the forward; in the graph."""
        if query_len == 1:
            assert self._step is not None
            shared, *kept = self._step
            count = kept[1].shape[0]
            now = shared.suffix(self._rows.block_table[:count], self._rows.seq_lens[:count])
            for tensor, new in zip(kept, now, strict=True):
                tensor.copy_(new)

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """While `active`, the forward's batch with its groups; as it is, if it is no decode step."""
        return replace(metadata, prefixes=self._step) if metadata.max_query_len == 1 else metadata
