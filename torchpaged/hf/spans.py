"""Spans of tokens that see each other in both directions inside a causal prompt: pictures, a prefix.

transformers says it in a mask function alone, which is asked here: at each position whether a query sees the
key behind it, which finds the spans, and then at every query and key whether spans and a window are all that
it says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_QUERIES = 512  # whose keys are compared at a time

MaskFunction = Callable[..., Any]
#: Window and chunk of a layer, in tokens; None = off.
Size = tuple[int | None, int | None]
#: Of each row the spans as ``(first, end)``, positions with padding; never of one token alone.
Rows = tuple[tuple[tuple[int, int], ...], ...]


class Prompt(NamedTuple):
    """Where the queries of a forward stand; positions count padding.

    Attributes:
        rows: of the batch.
        first: the position of each row's first query.
        length: queries per row.
        padding: of each row; empty: none.
        device: where the tensors lie that a mask function may look into.
    """

    rows: int
    first: int
    length: int
    padding: Sequence[int] = ()
    device: torch.device | str = "cpu"

    @property
    def end(self) -> int:
        """The position behind the last query."""
        return self.first + self.length

    def starts(self) -> list[int]:
        """The first position of each row that is a token."""
        return list(self.padding) or [0] * self.rows


class Spans(NamedTuple):
    """The spans of a forward, for layers of one kind.

    Attributes:
        rows: where they are; empty: there are none.
        windowed: whether the layer's window hides keys from a span's queries, too.
    """

    rows: Rows = ()
    windowed: bool = True


def sees_next(mask_function: MaskFunction, rows: int, first: Any, count: int, device: Any) -> Tensor:
    """Whether the query at each position from ``first`` on sees the key behind it, ``[rows, count]`` bool."""
    row = torch.arange(rows, device=device)[:, None]
    query = first + torch.arange(count, device=device)[None]
    head = torch.zeros((), dtype=torch.int64, device=device)
    seen = _ask(mask_function, (row, head, query, query + 1), (rows, count))
    return seen


def _ask(mask_function: MaskFunction, places: tuple[Tensor, ...], shape: tuple[int, int]) -> Tensor:
    """``mask_function(row, head, query, key)`` of broadcastable places, as ``shape`` of bool."""
    try:
        return torch.as_tensor(mask_function(*places), device=places[0].device).expand(shape).bool()
    except Exception:
        if torch.compiler.is_compiling():
            raise
    # A function of single positions, as transformers' own vmap would call it.
    device = places[0].device
    single = torch.vmap(lambda *place: torch.as_tensor(mask_function(*place), device=device).bool())
    return single(*(place.expand(shape).reshape(-1) for place in places)).view(shape)


def find_spans(mask_function: MaskFunction, prompt: Prompt) -> Rows:
    """The runs of tokens that see the one behind them; empty if no row has any. Reads the device once."""
    count = prompt.length - 1
    seen = sees_next(mask_function, prompt.rows, prompt.first, count, prompt.device).cpu()
    found: list[tuple[tuple[int, int], ...]] = []
    for row, start in zip(seen.tolist(), prompt.starts(), strict=True):
        spans: list[tuple[int, int]] = []
        for position, more in enumerate(row, prompt.first):
            if more and position >= start:
                joins = bool(spans) and spans[-1][1] == position + 1
                first = spans.pop()[0] if joins else position
                spans.append((first, position + 2))
        found.append(tuple(spans))
    return tuple(found) if any(found) else ()


def cuts_a_span(mask_function: MaskFunction, prompt: Prompt) -> bool:
    """Whether the prompt's last query sees the key behind it, which only a later forward brings."""
    try:
        return bool(sees_next(mask_function, prompt.rows, prompt.end - 1, 1, prompt.device).any())
    except Exception:  # a mask over the prompt's own tokens can't be asked
        return False


def agreeing(
    mask_function: MaskFunction, prompt: Prompt, spans: Sequence[Spans], sizes: Sequence[Size]
) -> list[list[bool]]:
    """Which spans and sizes say together what ``mask_function`` says, at every query and key of every row.

    Args:
        mask_function: transformers' ``(row, head, query, key) -> bool``.
        prompt: the forward.
        spans: candidates, with the same rows all of them.
        sizes: of layers. None with a chunk agrees where there are spans.

    Returns:
        For each of ``spans`` a bool for each of ``sizes``.
    """
    good = torch.ones(len(spans), len(sizes), dtype=torch.bool, device=prompt.device)
    head = torch.zeros((), dtype=torch.int64, device=prompt.device)
    for row, start in enumerate(prompt.starts()):
        keys = torch.arange(start, prompt.end, device=prompt.device)
        ends = keys + 1  # of the keys that each query sees
        inside = torch.zeros_like(keys, dtype=torch.bool)
        for first, end in spans[0].rows[row] if spans[0].rows else ():
            ends[first - start : end - start] = end
            inside[first - start : end - start] = True
        for begin in range(max(prompt.first - start, 0), len(keys), _QUERIES):
            part = slice(begin, begin + _QUERIES)
            query, end_of = keys[part, None], ends[part, None]
            got = _ask(mask_function, (head + row, head, query, keys[None]), (len(query), len(keys)))
            for j, size in enumerate(sizes):
                near = _near(query - start, keys[None] - start, size)
                for i, candidate in enumerate(spans):
                    seen = near if candidate.windowed else near | inside[part, None]
                    good[i, j] &= (got == ((keys[None] < end_of) & seen)).all()
    if spans[0].rows:
        for j, (_, chunk) in enumerate(sizes):
            good[:, j] &= chunk is None
    found: list[list[bool]] = good.tolist()
    return found


def _near(query: Tensor, key: Tensor, size: Size) -> Tensor:
    """Whether a layer's window and chunk let ``query`` see ``key``; positions without padding."""
    window, chunk = size
    near = torch.ones_like(query == key)
    if window is not None:
        near = near & (key > query - window)
    if chunk is not None:
        near = near & (key // chunk == query // chunk)
    return near
