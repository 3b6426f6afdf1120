"""Batches of encoders, and of queries that attend to an encoder's cached tokens."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from torchpaged.custom_ops.checks import is_int
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import repr_of_fields
from torchpaged.metadata.batch import AttentionMetadata
from torchpaged.metadata.checks import num_rows
from torchpaged.metadata.host import to_device


def _check_lens(name: str, lens: Sequence[int]) -> list[int]:
    if not isinstance(lens, Iterable) or not all(is_int(n) and n >= 0 for n in lens):
        raise ArgumentError(name, "lengths of at least 0, as ints", repr(lens))
    return [int(n) for n in lens]


def encoder_metadata(
    lens: Sequence[int], *, max_len: int | None = None, device: torch.device | str = "cpu"
) -> AttentionMetadata:
    """A batch of packed rows without a cache, for `torchpaged.layers.EncoderOnlyAttention`: tokens are blocks
    of one, and a row's table counts its tokens.

    Args:
        lens: tokens of each row; the rows are packed in this order.
        max_len: upper bound of the lengths, and width of the table; default: the longest row.
        device: where the tensors go.

    Raises:
        ArgumentError: a negative length, or one above ``max_len``.
    """
    numbers = _check_lens("lens", lens)
    longest = max(numbers, default=0)
    width = max(longest, 1) if max_len is None else max_len
    if not is_int(width) or longest > width:
        raise ArgumentError("max_len", f"at least the longest row ({longest})", str(max_len))
    starts = [0, *itertools.accumulate(numbers)]
    query_start_loc = to_device(starts, torch.int32, device)
    columns = torch.arange(width, dtype=torch.int32, device=query_start_loc.device)
    table = (query_start_loc[:-1, None] + columns).clamp_(max=max(starts[-1] - 1, 0))
    return AttentionMetadata(
        table, to_device(numbers, torch.int32, device), query_start_loc, None, None, width, 1, tuple(numbers)
    )


@dataclass
class CrossMetadata:
    """A batch of cross attention: queries of a decoder over the cached tokens of an encoder.

    Attributes:
        attention: each query as a request over its row's encoder tokens, since a row may have more queries
            than keys; its ``slot_mapping`` is that of ``written``.
        written: the batch of encoder tokens whose keys this step writes; None where all were written before.
    """

    attention: AttentionMetadata
    written: AttentionMetadata | None = None

    __repr__ = repr_of_fields

    @classmethod
    def from_lists(
        cls,
        query_lens: Sequence[int],
        encoder_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        block_size: int,
        num_blocks: int | None = None,
        max_blocks_per_req: int | None = None,
        written: AttentionMetadata | None = None,
        device: torch.device | str = "cpu",
    ) -> "CrossMetadata":
        """Build the batch on the host, check it, and move it to ``device``.

        Args:
            query_lens: queries of each row.
            encoder_lens: the encoder's tokens that each row holds.
            block_tables: the blocks that hold them.
            block_size, num_blocks, max_blocks_per_req: as for `AttentionMetadata.from_lists`.
            written: the encoder tokens that this step writes.
            device: where the tensors go.

        Raises:
            ArgumentError: lengths, blocks or ids do not fit together.
        """
        queries, lens = _check_lens("query_lens", query_lens), _check_lens("encoder_lens", encoder_lens)
        for name, count in (("query_lens", len(queries)), ("block_tables", num_rows(block_tables))):
            if count != len(lens):
                raise ArgumentError(name, f"one for each of {len(lens)} rows", str(count))
        rows = [row for row, count in enumerate(queries) for _ in range(count)]
        # No query writes; its position does not matter.
        attention = AttentionMetadata.from_lists(
            query_lens=[0] * len(rows),
            seq_lens=[lens[row] for row in rows],
            block_tables=[block_tables[row] for row in rows],
            block_size=block_size,
            num_blocks=num_blocks,
            max_blocks_per_req=max_blocks_per_req,
            max_query_len=1,
            device=device,
        )
        starts = to_device(list(range(len(rows) + 1)), torch.int32, device)
        return cls(
            replace(
                attention,
                query_start_loc=starts,
                slot_mapping=None if written is None else written.slot_mapping,
                positions=None,
                query_lens=(1,) * len(rows),
            ),
            written,
        )
