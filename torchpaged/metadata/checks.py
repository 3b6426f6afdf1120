"""What a batch of host lists must keep to: lengths, blocks and slots that fit together."""

from __future__ import annotations

import numbers
import reprlib
from array import array
from collections.abc import Iterable, Sequence

from torchpaged.custom_ops.errors import ArgumentError


def integers(name: str, values: Iterable[int]) -> list[int]:
    """The numbers of a list, an array or a tensor as Python's own; raises `ArgumentError` of what is no
    integer of 64 bits, 2.0 included: a tensor of integers would be made of it without a word."""
    try:
        return array("q", iter(values)).tolist()
    except (TypeError, OverflowError):
        raise ArgumentError(name, "integers", reprlib.repr(values)) from None


def check_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    num_blocks: int | None = None,
) -> None:
    """Refuse a batch whose lengths and blocks do not fit together; raises `ArgumentError`.

    That includes a block twice in one request, and two requests that write one slot. Shared blocks that are
    only read are fine.
    """
    if not isinstance(block_size, numbers.Integral) or isinstance(block_size, bool) or block_size < 1:
        raise ArgumentError("block_size", "an int of at least 1 token", repr(block_size))
    if not len(query_lens) == len(seq_lens) == len(block_tables):
        raise ArgumentError(
            "block_tables",
            f"one row and one length per request ({len(seq_lens)})",
            f"{len(query_lens)} query_lens, {len(seq_lens)} seq_lens, {len(block_tables)} rows",
        )
    query_lens, seq_lens = integers("query_lens", query_lens), integers("seq_lens", seq_lens)
    for row, (query_len, seq_len, blocks) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
        if query_len < 0 or seq_len < 0:
            raise ArgumentError(
                "seq_lens", "lengths of at least 0", f"query_len {query_len}, seq_len {seq_len} in row {row}"
            )
        needed = -(-seq_len // block_size)
        if len(blocks) < needed:
            raise ArgumentError(
                "block_tables",
                f"{needed} blocks of {block_size} for {seq_len} tokens in row {row}",
                f"{len(blocks)}",
                "allocate before building the batch",
            )
        ids = integers("block_tables", blocks)[:needed]
        low, high = min(ids, default=1), max(ids, default=0)
        if low < 1 or (num_blocks is not None and high >= num_blocks):
            raise ArgumentError(
                "block_tables",
                f"block ids in [1, {num_blocks or 'num_blocks'}) (0 is the null block)",
                f"ids in [{low}, {high}] in row {row}",
            )
        if len(set(ids)) < needed:
            raise ArgumentError(
                "block_tables",
                "every block once per request",
                f"a block several times in row {row}: {list(ids)}",
            )
    _check_one_writer(query_lens, seq_lens, block_tables, block_size)


def _check_one_writer(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]], block_size: int
) -> None:
    # Block -> (first slot, end, row) of what each request writes into it.
    writers: dict[int, list[tuple[int, int, int]]] = {}
    for row, (query_len, seq_len, blocks) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
        first = max(seq_len - query_len, 0)
        for column in range(first // block_size, -(-seq_len // block_size) if seq_len > first else 0):
            start, end = max(first - column * block_size, 0), min(seq_len - column * block_size, block_size)
            block = int(blocks[column])
            for other_start, other_end, other in writers.setdefault(block, []):
                if start < other_end and other_start < end:
                    raise ArgumentError(
                        "block_tables",
                        "one request per slot that is written",
                        (
                            f"rows {other} and {row}, which both write slot {max(start, other_start)} of "
                            f"block {block}"
                        ),
                        "requests may share blocks they only read; give each a block of its own to write",
                    )
            writers[block].append((start, end, row))
