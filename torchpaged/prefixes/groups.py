"""Which requests share a prefix, on the host, by the identity of their blocks."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import repr_of_fields


class PrefixGroup(NamedTuple):
    """Requests whose first ``num_blocks`` blocks are the same ones.

    Attributes:
        rows: of the batch, ascending.
        num_blocks: full blocks that all of them share, each before the first query token of every one.
    """

    rows: tuple[int, ...]
    num_blocks: int

    def __repr__(self) -> str:
        return repr_of_fields(self)

    @property
    def saved_blocks(self) -> int:
        """Blocks of keys that need not be read again."""
        return (len(self.rows) - 1) * self.num_blocks


def find_prefix_groups(
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    block_size: int,
) -> list[PrefixGroup]:
    """The groups of one level that save the most reads.

    Requests that share a short prefix, and some of them a longer one, are one group or several, whichever
    saves more; a request is in one group at most. A group's query tokens are at most as many as its prefix
    has tokens: more of them, or a request with more of its own, make several groups, or none.

    Args:
        block_tables: the blocks of each request, in order.
        query_lens: new tokens of each.
        seq_lens: KV tokens of each, the new ones included.
        block_size: tokens per block.

    Raises:
        ArgumentError: not as many of each as there are requests.
    """
    if not len(block_tables) == len(query_lens) == len(seq_lens):
        got = f"{len(block_tables)} rows, {len(query_lens)} query_lens, {len(seq_lens)} seq_lens"
        raise ArgumentError("block_tables", "one row and one length of each kind per request", got)
    shareable = [max(n - q, 0) // block_size for q, n in zip(query_lens, seq_lens, strict=True)]
    rows = [row for row in range(len(seq_lens)) if query_lens[row] > 0 and shareable[row] > 0]
    groups = [
        part
        for group in _best(rows, 0, block_tables, shareable)
        for part in _with_room(group, query_lens, block_size)
    ]
    return sorted(group for group in groups if group.saved_blocks)


def _best(
    rows: Sequence[int], depth: int, tables: Sequence[Sequence[int]], shareable: Sequence[int]
) -> list[PrefixGroup]:
    """The best groups of rows that share their first ``depth`` blocks."""
    if len(rows) < 2:
        return []
    depth = _shared(rows, depth, tables, shareable)
    whole = [PrefixGroup(tuple(rows), depth)]
    alike: dict[int, list[int]] = {}  # rows by the block behind these
    for row in rows:
        if shareable[row] > depth:
            alike.setdefault(tables[row][depth], []).append(row)
    parts = [
        group
        for same in alike.values()
        if len(same) > 1
        for group in _best(same, depth + 1, tables, shareable)
    ]
    taken = {row for group in parts for row in group.rows}
    rest = tuple(row for row in rows if row not in taken)
    if parts and len(rest) > 1:
        parts.append(PrefixGroup(rest, depth))
    return max(whole, parts, key=lambda groups: sum(group.saved_blocks for group in groups))


def _shared(
    rows: Sequence[int], depth: int, tables: Sequence[Sequence[int]], shareable: Sequence[int]
) -> int:
    """How many blocks all of these rows share, ``depth`` of them known. Slices are compared: rows are
    long."""
    limit, first = min([shareable[row] for row in rows]), tables[rows[0]]
    for row in rows[1:]:
        if limit == depth:
            break
        other, known = tables[row], depth

        def differs(place: int, other: Sequence[int] = other, known: int = known) -> bool:
            return list(other[known : place + 1]) != list(first[known : place + 1])

        limit = bisect.bisect_left(range(limit), True, lo=known, key=differs)
    return limit


def _with_room(group: PrefixGroup, query_lens: Sequence[int], block_size: int) -> list[PrefixGroup]:
    """The group in parts of at most as many query tokens as the prefix has; rows of more are left out.

    The op counts a query's position back from the last key, and shows one before the first key nothing.
    """
    room = group.num_blocks * block_size
    parts: list[list[int]] = [[]]
    tokens = 0
    for row in group.rows:
        if query_lens[row] > room:
            continue
        if tokens + query_lens[row] > room:
            parts.append([])
            tokens = 0
        parts[-1].append(row)
        tokens += query_lens[row]
    return [PrefixGroup(tuple(rows), group.num_blocks) for rows in parts]
