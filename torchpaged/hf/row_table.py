"""Where the rows' tokens lie in layers of one kind: their blocks on the host, and the table of these on the
device. A cache has a `RowTable`, and a `RingTable` for layers with a window whose blocks are rings. Errors of
rows say what to do."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchpaged.cache import RollingBlocks
from torchpaged.cache.row_blocks import RowBlocks
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import counted
from torchpaged.metadata.fields import BatchSizes, make_batch_tensors
from torchpaged.metadata.host import host_block_table, slots_at

#: What to do about a prompt that does not go on behind the cached tokens.
ANOTHER_PROMPT = (
    "call cache.reset() before another prompt, and before the same one again; generate(use_cache=False) runs "
    "all tokens in every step: give it use_cache=True"
)


def incomplete() -> ArgumentError:
    """The error of rows of which some layers hold more tokens than others."""
    return ArgumentError(
        "past_key_values",
        "a PagedCache whose forwards all completed",
        "one whose last forward raised, or still runs, between two layers",
        "its layers hold different tokens: call cache.reset() and start from the prompt",
    )


def other_rows(rows: int, got: int) -> ArgumentError:
    """The error of a forward over other rows than the cache's."""
    return ArgumentError(
        "input_ids",
        f"{counted(rows, 'row')}, as in this cache's first batch",
        counted(got, "row"),
        "call cache.reset() before another batch",
    )


def too_many_rows(expected: str, max_rows: int) -> ArgumentError:
    """The error of more rows than a cache has room for; ``expected``: that room, in words."""
    return ArgumentError("max_batch_size", expected, str(max_rows), "build a larger PagedCache")


def other_layout(name: str, layer: int, takes: str, got: str) -> ArgumentError:
    """The error of states that the pools of ``layer`` were not made for."""
    return ArgumentError(
        name,
        f"{takes}, as this cache's layer {layer} was made for",
        got,
        "a cache keeps the layout of the model that used it first: make a new PagedCache of the model's "
        "config",
    )


def assert_fits(fits: Tensor) -> None:
    """Where ``fits`` (a bool on the device) is False, fail in a step that is compiled by hand: such a step
    has no host hook at all. On a GPU the assertion fires there; torch has no public asynchronous one, and
    tests/hf/test_refusals.py notices if this one goes."""
    torch._assert_async(
        fits,
        "PagedCache: more tokens than max_seq_len or, where num_blocks lets rows grow and a step is "
        "compiled by hand, than they have blocks for; other rows than those of this cache's first batch; "
        "or a forward before did not complete; call cache.reset()",
    )


class RowTable:
    """The blocks of each row, and their table on the device.

    Args:
        blocks: of the rows.
        max_rows: rows at most.
        width: columns of the table.

    Attributes:
        table: ``[max_rows, width]`` int32; changes with the rows' blocks only.
    """

    table: Tensor
    blocks: RowBlocks | RollingBlocks

    def __init__(self, blocks: RowBlocks | RollingBlocks, max_rows: int, width: int) -> None:
        self.blocks, self._sizes = blocks, BatchSizes(max_rows, max_rows, width)

    def make_tensors(self, device: torch.device) -> None:
        """Table and slots on ``device``."""
        tensors = make_batch_tensors(("block_table", "slot_mapping"), self._sizes, device)
        self.table, self._decode_slots = tensors.values()
        for tensor in tensors.values():  # guard=False: a new cache must not recompile the model
            torch._dynamo.mark_static_address(tensor, guard=False)

    def _rows(self) -> Sequence[Sequence[int]]:
        """Block ids of each row."""
        assert isinstance(self.blocks, RowBlocks)
        return self.blocks.rows

    def upload(self) -> None:
        """Block ids of all rows to the device's table; nothing waits for a GPU."""
        rows = self._rows()
        table = host_block_table(rows, len(rows), self.table.shape[1], self.table.is_cuda)
        self.table[: len(rows)].copy_(table, non_blocking=True)

    def slots_of(self, positions: Tensor) -> Tensor:
        """The slots of ``positions [batch, n]`` int64; -1 of those below 0. ``[batch * n]`` int64."""
        return slots_at(positions, self.table[: positions.shape[0]], self.blocks.block_size).reshape(-1)

    def note_decode(self, positions: Tensor) -> None:
        """The slots of a decode step, ``positions [batch, 1]``, where `decode_slots` finds them."""
        self._decode_slots[: positions.shape[0]].copy_(self.slots_of(positions))

    def decode_slots(self, batch: int) -> Tensor:
        """What `note_decode` was told, ``[batch]`` int64."""
        return self._decode_slots[:batch]


class RingTable(RowTable):
    """The rings of each row, whose blocks a row uses over and over.

    Attributes:
        longest: tokens per row, padding included, that were there when tokens were taken back.
    """

    blocks: RollingBlocks
    longest = 0

    def _rows(self) -> Sequence[Sequence[int]]:
        return [self.blocks.table(ring, self.table.shape[1]) for ring in self.blocks.rings]

    def require_kept(self, lengths: Sequence[int], total: int, count: int) -> None:
        """Refuse to take back ``count`` tokens where a row's next query would see tokens that were written
        over.

        Args:
            lengths: tokens of each row, without padding.
            total: tokens per row, with padding.
            count: how many of them go.

        Raises:
            ArgumentError: a row lacks them.
        """
        longest = max(self.longest, total)
        for length in lengths:
            if not self.blocks.keeps(length - count, length + longest - total):
                raise ArgumentError(
                    "tokens_to_remove",
                    f"few enough that the layers with a window of {self.blocks.window} tokens still have "
                    "what the next token sees",
                    f"{count}, of rows that were {longest} tokens long",
                    "build the PagedCache with a larger sliding_step",
                )
