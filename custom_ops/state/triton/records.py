"""What the launchers of the state ops hand to their kernels. No import of Triton."""

from typing import Any, NamedTuple, Self

from torch import Tensor

from torchpaged.custom_ops.state.call import LinearAttentionCall
from torchpaged.custom_ops.triton.launching import next_power_of_2


class Sizes(NamedTuple):
    """What the kernels of ``linear_attention`` are compiled for.

    Attributes:
        heads: of values and states; ``group``: of them per head of keys.
        key_pad: a power of two of at least ``key_dim``.
        tile: columns of values, or of keys, of a program at a time.
        by_key: whether a state's rows decay one by one; ``delta``: whether the delta rule is applied.
        short: rows of more tokens, and what is behind the last row, are the chunks' kernels'; 0: none are.
        chunk, precision: as of `chunks.Tiles`.
    """

    heads: int
    group: int
    key_dim: int
    key_pad: int
    value_dim: int
    tile: int
    by_key: bool
    delta: bool
    normalize: bool
    short: int
    chunk: int
    precision: str

    @classmethod
    def of(
        cls, call: LinearAttentionCall, tile: int, short: int = 0, chunk: int = 0, precision: str = ""
    ) -> Self:
        """Those of a call; products of a chunk's matrices take keys of 16 numbers at least."""
        (_, key_heads, key_dim), (_, heads, value_dim) = call.q.shape, call.v.shape
        widths = key_dim, max(next_power_of_2(key_dim), 16 if chunk else 1), value_dim, tile
        flags = call.g.dim() == 3, call.delta_rule, call.normalize
        return cls(heads, heads // key_heads, *widths, *flags, short, chunk, precision)


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
