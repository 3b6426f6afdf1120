"""A batch's requests by what they do: decodes have one query token, prefills more, padding none.

Counted from the host's query lengths alone, and cut without looking at the device: requests of one token
come first, so that both parts are slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchpaged.custom_ops.errors import ArgumentError


class PartCounts(NamedTuple):
    """How many requests and query tokens of each kind; vLLM's words."""

    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int


def count_parts(query_lens: Sequence[int] | None, num_reqs: int) -> PartCounts:
    """Of a batch with these query lengths. A prompt of one token counts as a decode: it is computed as one.

    Raises:
        ValueError: the host does not know the query lengths, or not as many as there are requests.
    """
    lens = known_query_lens(query_lens, num_reqs)
    prefills = [n for n in lens if n > 1]
    decodes = sum(n == 1 for n in lens)
    return PartCounts(decodes, decodes, len(prefills), sum(prefills))


def known_query_lens(query_lens: Sequence[int] | None, num_reqs: int) -> tuple[int, ...]:
    """``query_lens``, if the host knows them; raises ValueError, as `count_parts` does."""
    if query_lens is None or len(query_lens) != num_reqs:
        raise ValueError(
            f"query_lens: expected the query lengths of the batch's {num_reqs} requests, got {query_lens}; "
            "build it with from_lists, or give them"
        )
    return tuple(query_lens)


def first_prefill(query_lens: Sequence[int]) -> int:
    """The row of the first request of more than one query token; the number of rows where there is none.

    Raises:
        ArgumentError: a request of one query token stands behind it.
    """
    first = next((row for row, n in enumerate(query_lens) if n > 1), len(query_lens))
    late = [row for row in range(first, len(query_lens)) if query_lens[row] == 1]
    if late:
        raise ArgumentError(
            "query_lens",
            "requests of one query token before those of more",
            f"one in row {late[0]}, behind row {first} with {query_lens[first]}",
            "order the requests before you build the batch",
        )
    return first
