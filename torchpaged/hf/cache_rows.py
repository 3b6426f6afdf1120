"""What generate() does to the rows of a paged cache between forwards: start over, take tokens back, reorder,
repeat, select.

`PagedCache` inherits it: transformers looks for these methods on the cache itself. The books of the blocks
are kept by `RowBlocks`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from torchpaged.cache import RowBlocks
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.forward_order import ForwardOrder
from torchpaged.hf.layer import PagedLayer


class CacheRows(Cache):
    """The rows of a `PagedCache`, as blocks and lengths.

    Attributes:
        blocks: which blocks each row holds.
        paged: the paged layers.
        max_rows: rows at most.
        ready: whether rows have blocks and the tensors below are filled.
        seq_lens: ``[max_rows]`` int32, tokens of each row without padding.
        total: int64 scalar tensor, tokens per row with padding.
        written_total: likewise, without a forward that has not completed.
        ops: the backend's op handles.
        name: the model's type, for messages.
        order: which layer writes first, and which wrote last.
    """

    blocks: RowBlocks
    paged: list[PagedLayer]
    max_rows: int
    ready: bool
    seq_lens: Tensor
    total: Tensor
    written_total: Tensor
    ops: BackendOps
    name: str
    order: ForwardOrder
    _padding: list[int] | None  # of each row, once a mask was seen
    _cut_padding: bool  # whether `crop` took back padding, so that the next mask says how much there is
    _is_open: bool  # whether a forward began and did not complete
    _num_forwards: int  # that began since the last reset, as far as the host knows
    _bound: int  # tokens per row at most, as far as the host knows: compiled steps do not count on the host

    def _forget_masks(self) -> None:
        """Before another conversation."""
        raise NotImplementedError

    def _upload_rows(self) -> None:
        """Block ids of all rows to the device's table."""
        raise NotImplementedError

    def _require_complete(self) -> None:
        """Refuse rows of which some layers hold more tokens than others."""
        raise NotImplementedError

    @property
    def batch_size(self) -> int:
        """Rows of the current batch; -1 before the first."""
        return len(self.blocks) or -1

    @property
    def is_updated(self) -> Any:
        """What decoders ask an EncoderDecoderCache for.

        Raises:
            UnsupportedModelError: always; this cache holds the keys of self-attention or of cross-attention,
                not both.
        """
        raise UnsupportedModelError(
            f"{self.name} is an encoder-decoder model and asks its cache for `is_updated`; "
            "pass past_key_values=EncoderDecoderCache(PagedCache(...), DynamicCache(config=model.config))"
        )

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back: yes, unless a layer of HuggingFace's own says no."""
        return all(getattr(layer, "is_croppable", True) for layer in self.layers)

    def reset(self) -> None:
        """Forget everything; the pools' memory stays. The next forward may have another batch size."""
        for layer in self.layers:
            # a paged one has nothing to do, unless it keeps a recurrent state beside its keys and values
            layer.reset()
        self.blocks.free()
        self._padding, self.ready = None, False
        self._is_open, self._num_forwards, self._cut_padding = False, 0, False
        self.order.reset()
        self._forget_masks()
        self._bound = 0  # the tensors stay where compiled code knows them; `prepare` fills them again

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
        if self.ready:
            self._require_complete()
            count = min(count, int(self.total))
            if count:
                self._unshare(count)
        for layer in self.layers:
            if hasattr(layer, "crop"):
                layer.crop(-count)  # a recurrent state may refuse: before the rows change
        if count and self.ready:
            self._take_back(count)

    def _take_back(self, count: int) -> None:
        """``count`` tokens less in every row. A row whose padding is reached keeps no token, and what is left
        of its padding."""
        for tensor in (self.total, self.written_total):
            tensor.sub_(count)
        self.seq_lens[: len(self.blocks)].sub_(count).clamp_min_(0)
        self._bound = int(self.total)
        if self._padding is not None:
            self._cut_padding |= max(self._padding) > self._bound
            self._padding = [min(padding, self._bound) for padding in self._padding]

    def _unshare(self, count: int) -> None:
        """Give every row blocks of its own from its last ``count`` tokens on."""
        copies = self.blocks.unshare(
            [max(length - count, 0) for length in self.seq_lens[: len(self.blocks)].tolist()]
        )
        if copies is not None:
            self._upload_rows()
            self._copy_blocks(copies)

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """``(source, destination)`` pairs in every layer's pools."""
        if copies:
            mapping = torch.tensor(copies, dtype=torch.int64, device=self.seq_lens.device)
            for layer in self.paged:
                layer.copy_blocks(mapping)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` continues row ``beam_idx[i]``: full blocks are shared, only the last partial one
        is copied."""
        self._reindex(beam_idx.tolist())
        for layer in self.layers:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, neighbours."""
        self._reindex([row for row in range(len(self.blocks)) for _ in range(repeats)])
        for layer in self.layers:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._reindex(indices.tolist())
        for layer in self.layers:
            layer.batch_select_indices(indices)

    def _reindex(self, parents: Sequence[int]) -> None:
        """New row ``i`` is a fork of old row ``parents[i]``, see `RowBlocks.reindex`."""
        self._require_complete()
        if len(parents) > self.max_rows:
            raise ArgumentError(
                "max_batch_size",
                f"at least {len(parents)} rows",
                str(self.max_rows),
                "build a larger PagedCache",
            )
        if list(parents) == list(range(len(self.blocks))):
            return
        copies = self.blocks.reindex(parents, self.seq_lens[: len(self.blocks)].tolist())
        index = torch.tensor(list(parents), device=self.seq_lens.device)
        self.seq_lens[: len(parents)] = self.seq_lens[index]
        if self._padding is not None:
            self._padding = [self._padding[parent] for parent in parents]
        self._upload_rows()
        self._copy_blocks(copies)
