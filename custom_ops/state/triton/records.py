"""What the launchers of the state ops hand to their kernels. No import of Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Pointers to the slots, lengths and starts of a batch's rows."""

    slots: Any
    lens: Any
    starts: Any


class Chunks(NamedTuple):
    """What the first kernel leaves to the second, tokens of a head one after the other: ``w [heads, tokens,
    key_dim]`` and ``u [heads, tokens, value_dim]`` with the delta rule, else None; ``scores [heads, tokens,
    chunk]``, of a chunk's tokens by each of them; and float32 factors ``[heads, tokens]``: ``since``, of what
    a token reads of the state at its chunk's begin, and ``left``, of what it leaves to the state at its end;
    ``decay``, of the whole chunk, at its first token."""

    w: Any
    u: Any
    scores: Any
    since: Any
    left: Any
    decay: Any


class State(NamedTuple):
    """A pointer to a pool, ``[num_slots, num_heads, key_dim, value_dim]``, and its strides."""

    ptr: Any
    slot: Any
    head: Any
    row: Any

    @classmethod
    def of(cls, x: Tensor) -> State:
        """That of a tensor."""
        return cls(x, *x.stride()[:3])


class Window(NamedTuple):
    """A pointer to a pool of the last inputs, ``[num_slots, width - 1, channels]``, and its strides."""

    ptr: Any
    slot: Any
    row: Any

    @classmethod
    def of(cls, x: Tensor) -> Window:
        """That of a tensor."""
        return cls(x, *x.stride()[:2])
