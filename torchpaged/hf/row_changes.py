"""What generate() does to the rows of a paged cache between forwards: take tokens back, and reorder, repeat
or select rows, which are one to us."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import is_int
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.hf.cache_rows import CacheRows
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.row_table import RowTable, too_many_rows
from torchpaged.hf.state_layer import StateLayer
from torchpaged.metadata.host import to_device
from torchpaged.prefixes.automatic import RowPrefixes

Pairs = list[tuple[int, int]]  # blocks: source, destination
#: Blocks to copy in the pools of the layers that have a table.
Copies = list[tuple[RowTable, Pairs]]


class RowChanges(PagedOwner):
    """What `torchpaged.hf.PagedCache` has of it."""

    rows: CacheRows
    prefixes: RowPrefixes

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens of every row, all at most (assisted generation).

        The rule of transformers since 5.18. In 5.17 a positive number is the length to keep, deprecated; here
        it is refused in either.

        Args:
            tokens_to_remove: 0 or negative.

        Raises:
            ArgumentError: a positive number, no integer, or a forward before that did not complete; nothing
                is taken back then.
        """
        try:
            count = -operator.index(tokens_to_remove)
        except (TypeError, ValueError):
            expected = "an integer of at most 0"
            raise ArgumentError("tokens_to_remove", expected, repr(tokens_to_remove)) from None
        if count < 0:
            raise ArgumentError(
                "tokens_to_remove",
                "0, or the number of tokens to take back with a minus",
                str(-count),
                "cache.crop(-n) takes back n tokens",
            )
        rows = self.rows
        if rows.ready:
            rows.require_complete()
            count = min(count, int(rows.total))
            for state in self.states if count else ():
                state.require_croppable(count)
            copies = _unshare(rows, count) if count else []
            self._copy_blocks(copies)
            if copies:
                self.prefixes.find([max(length - count, 0) for length in rows.lengths()])
        for layer in self.layers:
            if hasattr(layer, "crop"):
                layer.crop(-count)  # a recurrent state may refuse: before the rows change
        if count and rows.ready:
            _take_back(rows, count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` continues row ``beam_idx[i]``: full blocks are shared, only the last partial one is
        copied, where two rows continue the same. Nothing to do for rows that hold nothing, as in
        transformers' caches.

        Raises:
            ArgumentError: rows that there are not, none at all, or more than there is room for; a forward
                before that did not complete. Nothing is changed then.
            BlockPoolExhaustedError: there are too few blocks; nothing is changed then.
        """
        self._reindex(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, neighbours; raises as `reorder_cache`."""
        self._reindex([row for row in range(len(self.rows.blocks)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, by their numbers; raises as `reorder_cache`."""
        self._reindex(indices.tolist())

    def _reindex(self, parents: Sequence[int]) -> None:
        """New row ``i`` is a fork of old row ``parents[i]``, see `RowBlocks.reindex`."""
        rows = self.rows
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
            raise too_many_rows(f"at least {len(parents)} rows", rows.max_rows)
        if list(parents) == list(range(num_rows)):
            return
        lengths = rows.lengths()
        self.prefixes.forget()
        self._copy_blocks(_fork(rows, parents, lengths))
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.reorder_cache(to_device(parents, torch.int64, rows.seq_lens.device))
        self.prefixes.find([lengths[parent] for parent in parents])

    def _copy_blocks(self, copies: Copies) -> None:
        """In the pools of every layer that has the table."""
        for table, pairs in copies:
            if pairs and self.late_copies is not None:
                self.late_copies.add(pairs)
            elif pairs:
                mapping = _mapping(pairs, len(pairs), table.table.device)
                _copy_in(self, mapping, rolls=table is self.rows.rolling)


def _unshare(rows: CacheRows, count: int) -> Copies:
    """Give every row blocks of its own from its last ``count`` tokens on: it will write there, and others
    must not see that. A ring is its row's own.

    Raises:
        ArgumentError: a ring lacks what is seen behind so many tokens.
    """
    lengths = rows.lengths()
    if rows.rolling is not None:
        rows.rolling.require_kept(lengths, int(rows.total), count)
    copies = rows.blocks.unshare([max(length - count, 0) for length in lengths])
    if copies is None:
        return []
    rows.upload()
    return [(rows.tables[0], copies)]


def _take_back(rows: CacheRows, count: int) -> None:
    """``count`` tokens less in every row. A row whose padding is reached keeps no token, and what is left
    of it."""
    if rows.rolling is not None:
        rows.rolling.longest = max(rows.rolling.longest, int(rows.total))
    for tensor in (rows.total, rows.written_total):
        tensor.sub_(count)
    rows.seq_lens[: len(rows.blocks)].sub_(count).clamp_min_(0)
    total = rows.recount()
    if rows.padding is not None:
        rows.cut_padding |= max(rows.padding) > total
        rows.padding = [min(padding, total) for padding in rows.padding]


def _fork(rows: CacheRows, parents: Sequence[int], lengths: Sequence[int]) -> Copies:
    """New row ``i`` is a fork of old row ``parents[i]``, which holds ``lengths[parents[i]]`` tokens, see
    `RowBlocks.reindex`."""
    copies = [(table, table.blocks.reindex(parents, lengths)) for table in rows.tables]
    if [lengths[parent] for parent in parents] != lengths:  # else the rows of a beam search
        index = to_device(parents, torch.int64, rows.seq_lens.device)
        rows.seq_lens[: len(parents)] = rows.seq_lens[index]
        rows.num_rows.fill_(len(parents))
    if rows.padding is not None:
        rows.padding = [rows.padding[parent] for parent in parents]
    rows.upload()
    return copies


def _mapping(pairs: Pairs, length: int, device: torch.device) -> Tensor:
    """``[length, 2]`` int64 of source and destination, those that are too many -1."""
    numbers = [block for pair in pairs for block in pair]
    return to_device([*numbers, *[-1] * (2 * length - len(numbers))], torch.int64, device).view(-1, 2)


def _copy_in(cache: PagedOwner, mapping: Tensor, rolls: bool = False) -> None:
    for layer in cache.layers:
        if isinstance(layer, PagedLayer) and layer.rolls == rolls:
            layer.copy_blocks(mapping)


class LateCopies:
    """The copies of blocks that a reordering asks for, made at the start of the next step, which is replayed:
    two launches a layer in front of it would cost the host more than the replay.

        cache.late_copies = late = LateCopies(cache, rows)
        late.launch(); model(...)               # what a graph holds
        late.stage(); graph.replay()

    Args:
        cache: without rings.
        most: copies of a reordering at most.
        device: of its pools.
    """

    def __init__(self, cache: PagedOwner, most: int, device: torch.device) -> None:
        self._cache, self._most = cache, most
        self._pairs: Pairs = []
        self._tensor = _mapping([], most, device)
        self._holds_some = False

    def add(self, pairs: Pairs) -> None:
        """Of a reordering; those of one before it, which has seen no step, are made first, and more than a
        step makes at once."""
        self.flush()
        self._pairs = pairs
        if len(pairs) > self._most:
            self.flush()

    def flush(self) -> None:
        """Make them now: another step follows, or none."""
        if self._pairs:
            _copy_in(self._cache, _mapping(self._pairs, len(self._pairs), self._tensor.device))
            self._pairs = []

    def launch(self) -> None:
        """Copy what `stage` has told."""
        _copy_in(self._cache, self._tensor)

    def stage(self) -> None:
        """Tell the next replay, which makes them."""
        if self._pairs or self._holds_some:
            self._tensor.copy_(_mapping(self._pairs, self._most, self._tensor.device))
        self._pairs, self._holds_some = [], bool(self._pairs)
