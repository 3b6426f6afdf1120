"""Every tensor of a batch, described once: name, dtype, axes and padding. Code that keeps a batch in tensors
of its own allocates, slices and pads by it.

sizes = BatchSizes(num_reqs=8, num_tokens=8, max_blocks_per_req=128)
tensors = make_batch_tensors(METADATA_FIELDS, sizes, "cuda")     # padding, all of it
FIELDS["slot_mapping"].padding                                   # -1: nothing is written
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: Of arrays, by the dtype of a tensor of their numbers.
CODES = {torch.int32: "i", torch.int64: "q"}


class BatchSizes(NamedTuple):
    """What the tensors of a batch have room for."""

    num_reqs: int
    num_tokens: int
    max_blocks_per_req: int


class BatchField(NamedTuple):
    """One tensor of a batch.

    Attributes:
        name: as in `AttentionMetadata`.
        dtype: of its numbers.
        axes: the sizes of its dimensions, by name: fields of `BatchSizes`, or ``num_reqs + 1``.
        padding: the value of requests and tokens that are not there; None: the last value before them, 0
            where there is none.
    """

    name: str
    dtype: torch.dtype
    axes: tuple[str, ...]
    padding: int | None

    def shape(self, sizes: BatchSizes) -> tuple[int, ...]:
        """Its shape in a batch of ``sizes``."""
        return tuple(
            sizes.num_reqs + 1 if axis == "num_reqs + 1" else getattr(sizes, axis) for axis in self.axes
        )

    def make(self, sizes: BatchSizes, device: torch.device | str) -> Tensor:
        """A tensor of nothing but padding, for normal use even under inference mode."""
        with torch.inference_mode(False):
            return torch.full(self.shape(sizes), self.padding or 0, dtype=self.dtype, device=device)

    def view(self, tensor: Tensor, sizes: BatchSizes) -> Tensor:
        """The part of a larger ``tensor`` that a batch of ``sizes`` has; a slice, no copy."""
        return tensor[tuple(slice(size) for size in self.shape(sizes))]

    def pad(self, numbers: Sequence[int], size: int) -> "array[int]":
        """``numbers`` with padding up to ``size`` of them."""
        padded, last = array(CODES[self.dtype], numbers), self.padding
        if last is None:
            last = padded[-1] if padded else 0
        padded.extend([last] * (size - len(padded)))
        return padded


#: The tensors of a batch: those of `AttentionMetadata`, in its order, and what else a step takes. Every
#: batch has those of `METADATA_FIELDS`; those of `TREE_FIELDS` only one with trees.
FIELDS = {
    field.name: field
    for field in (
        BatchField("block_table", torch.int32, ("num_reqs", "max_blocks_per_req"), 0),
        BatchField("seq_lens", torch.int32, ("num_reqs",), 0),
        BatchField("query_start_loc", torch.int32, ("num_reqs + 1",), None),
        BatchField("slot_mapping", torch.int64, ("num_tokens",), -1),
        BatchField("positions", torch.int64, ("num_tokens",), 0),
        BatchField("tree_mask", torch.int64, ("num_tokens",), 0),
        BatchField("input_ids", torch.int64, ("num_tokens",), 0),
        BatchField("logits_indices", torch.int64, ("num_reqs",), 0),
    )
}
METADATA_FIELDS = ("block_table", "seq_lens", "query_start_loc", "slot_mapping", "positions")
TREE_FIELDS = ("tree_mask",)
ALL_METADATA_FIELDS = (*METADATA_FIELDS, *TREE_FIELDS)


def make_batch_tensors(
    names: Iterable[str], sizes: BatchSizes, device: torch.device | str
) -> dict[str, Tensor]:
    """Tensors of a batch of ``sizes``, padding all of it, by name."""
    return {name: FIELDS[name].make(sizes, device) for name in names}


def pad_batch_tensors(tensors: Mapping[str, Tensor], sizes: BatchSizes) -> None:
    """Make the first requests and tokens of ``tensors`` padding, in place: a step over them writes nothing
    and reads nothing."""
    for name, tensor in tensors.items():
        FIELDS[name].view(tensor, sizes).fill_(FIELDS[name].padding or 0)
