"""What the launchers of the state ops hand to their kernels. No import of Triton."""

from typing import Any, NamedTuple, Self

from torch import Tensor


class Batch(NamedTuple):
    """Pointers to the slots, lengths and starts of a batch's rows."""

    slots: Any
    lens: Any
    starts: Any


class Chunks(NamedTuple):
    """What the first kernel leaves to the second, tokens of a head one after the other: ``scores [heads,
    tokens, chunk]``, of a chunk's tokens by each of them; and float32 factors ``[heads, tokens]``: ``since``,
    of what a token's query reads of the state at its chunk's begin, and ``left``, of what its key leaves to
    the state at its end; ``decay``, of the whole chunk, at its first token. With the delta rule also
    ``solved``, like ``scores``, of a chunk's updates by the values that its keys do not know yet, and
    ``seen``, a factor of what a token's key knows of the state at its chunk's begin.

    Where keys' columns decay one by one, the columns' factors are in ``queries``, ``known`` and ``keys``,
    ``[heads, tokens, key_dim]``, which stand for queries and keys, and ``since``, ``seen`` and ``left`` have
    norms alone; ``decay [chunks, heads, key_dim]`` has a row's chunks from ``starts[row] // chunk + row`` on;
    ``sums``: float32 of the first kernel's own, a column tile wide."""

    scores: Any
    since: Any
    left: Any
    decay: Any = None
    solved: Any = None
    seen: Any = None
    queries: Any = None
    known: Any = None
    keys: Any = None
    sums: Any = None


class State(NamedTuple):
    """A pointer to a pool, ``[num_slots, num_heads, key_dim, value_dim]``, and its strides."""

    ptr: Any
    slot: Any
    head: Any
    row: Any

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """That of a tensor."""
        return cls(x, *x.stride()[:3])


class Window(NamedTuple):
    """A pointer to a pool of the last inputs, ``[num_slots, width - 1, channels]``, and its strides."""

    ptr: Any
    slot: Any
    row: Any

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """That of a tensor."""
        return cls(x, *x.stride()[:2])
