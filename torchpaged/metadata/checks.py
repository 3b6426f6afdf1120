"""What a batch of host lists must keep to: lengths, blocks and slots that fit together."""

import itertools
import math
import reprlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import counted

#: No rows: an array that is made of bytes takes several of them for a number, and sets have no order.
_NO_ROWS = {bytes, bytearray, set, frozenset, dict}


def integers(name: str, values: Iterable[int], bits: int = 64, given: object = None) -> Sequence[int]:
    """The numbers of a list, an array or a tensor as Python's own; raises `ArgumentError` of what is no
    integer of so many bits, 64 or 32, 2.0 included: a tensor of integers would be made of it without a
    word. ``given``: what the message shows in place of ``values``."""
    if isinstance(values, array) and values.typecode == "q" and bits == 64:
        return values
    try:
        # of a list: that of an iterator takes array twice as long
        return array("q" if bits == 64 else "i", list(values)).tolist()
    except (TypeError, OverflowError) as error:
        raise ArgumentError(
            name, "integers", f"{reprlib.repr(values if given is None else given)} ({error})"
        ) from None


def count(name: str, values: Any, expected: str = "a list of integers") -> int:
    """How many ``values`` there are; raises `ArgumentError` where they can't be counted."""
    try:
        return len(values)
    except TypeError:  # a tensor without dimensions has __len__, too
        raise ArgumentError(name, expected, repr(values)) from None


def num_rows(block_tables: object) -> int:
    """Of a list of rows; raises `ArgumentError` where it is none."""
    return count("block_tables", block_tables, "a list of blocks for each request")


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
    check_sizes(block_size=block_size)
    integers("block_size", [block_size], 32)
    if num_blocks is not None:
        check_sizes(num_blocks=num_blocks)
    for name, lens in (("query_lens", query_lens), ("seq_lens", seq_lens)):
        count(name, lens)  # what is read once would be gone behind this check
    query_lens, seq_lens = integers("query_lens", query_lens, 32), integers("seq_lens", seq_lens, 32)
    if not len(query_lens) == len(seq_lens) == num_rows(block_tables):
        raise ArgumentError(
            "block_tables",
            f"one row and one length per request ({len(seq_lens)})",
            f"{len(query_lens)} query_lens, {len(seq_lens)} seq_lens, {len(block_tables)} rows",
        )
    if not _NO_ROWS.isdisjoint(map(type, block_tables)):
        raise ArgumentError("block_tables", "a list of blocks for each request", reprlib.repr(block_tables))
    every = integers("block_tables", itertools.chain.from_iterable(block_tables), 32, block_tables)
    most = math.inf if num_blocks is None else num_blocks - 1
    # of all rows at once; a row is looked at by itself where what lies behind some length may be garbage
    all_good = min(every, default=1) >= 1 and max(every, default=1) <= most
    end = 0
    for row, (query_len, seq_len, blocks) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
        start, end = end, end + len(blocks)
        if query_len < 0 or seq_len < 0:
            raise ArgumentError(
                "seq_lens", "lengths of at least 0", f"query_len {query_len}, seq_len {seq_len} in row {row}"
            )
        if query_len > seq_len:
            raise ArgumentError(
                "seq_lens",
                f"at least the {counted(query_len, 'new token')} of row {row}",
                str(seq_len),
                "count the new tokens, too: those before them and the new ones",
            )
        needed = -(-seq_len // block_size)
        if len(blocks) < needed:
            raise ArgumentError(
                "block_tables",
                f"{counted(needed, 'block')} of {block_size} for {counted(seq_len, 'token')} in row {row}",
                str(len(blocks)),
                "allocate before building the batch",
            )
        ids = every[start : start + needed]
        if not all_good and ids and not 1 <= min(ids) <= max(ids) <= most:
            raise ArgumentError(
                "block_tables",
                f"block ids in [1, {num_blocks or 'num_blocks'}) (0 is the null block)",
                f"ids in [{min(ids)}, {max(ids)}] in row {row}",
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
    written = [
        block
        for query_len, seq_len, blocks in zip(query_lens, seq_lens, block_tables, strict=True)
        if query_len
        for block in map(int, blocks[(seq_len - query_len) // block_size : -(-seq_len // block_size)])
    ]
    if len(set(written)) == len(written):
        return
    # Block -> (first slot, end, row) of what each request writes into it.
    writers: dict[int, list[tuple[int, int, int]]] = {}
    for row, (query_len, seq_len, blocks) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
        first = seq_len - query_len
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
