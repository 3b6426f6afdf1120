"""TokenRing: sampled tokens on their way to the host, read one launch late.

    # after a replay: a copy to pinned memory and an event; the host goes on
    slot = ring.push(rows.tokens_out)
    ...                                     # the next launch is on its way meanwhile
    tokens = ring.read(slot)                # waits for that event only

A slot is free again once it was read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import TorchpagedError


class RingFullError(TorchpagedError, RuntimeError):
    """More launches in flight than the ring holds; read the oldest first."""


class TokenRing:
    """Pinned host memory for the tokens of several launches.

    Args:
        depth: launches in flight at most.
        num_tokens: tokens of a launch at most.
        device: where they come from; on a CPU the copy is immediate.
    """

    def __init__(self, depth: int, num_tokens: int, device: torch.device | str) -> None:
        device = torch.device(device)
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(depth, num_tokens, dtype=torch.int64, pin_memory=on_gpu, device="cpu")
        # torch.Event finds the current stream in C++: 0.5 us to record; torch.cuda.Event makes a Python
        # object of it, 4.5 us
        self._events = [torch.Event(device) for _ in range(depth)] if on_gpu else None
        self._shapes: list[torch.Size | None] = [None] * depth  # of what a slot holds
        # A slot as a tensor of some shape: made once, since a push is host time.
        self._places: dict[tuple[int, torch.Size], Tensor] = {}

    def push(self, tokens: Tensor) -> int:
        """Start copying ``tokens``, int64 and contiguous; returns the slot to read."""
        if None not in self._shapes:
            raise RingFullError(
                f"{len(self._shapes)} launches are in flight and none was read; read the oldest before the "
                "next launch"
            )
        slot, shape = self._shapes.index(None), tokens.shape
        self._shapes[slot] = shape
        place = self._places.get((slot, shape))
        if place is None:
            place = self._places[slot, shape] = self._host[slot, : tokens.numel()].view(shape)
        place.copy_(tokens, non_blocking=True)
        if self._events is not None:
            self._events[slot].record()
        return slot

    def read(self, slot: int) -> list[list[int]]:
        """The tokens of a slot, as ``[steps][rows]``; waits until they are there. Frees the slot."""
        shape = self._shapes[slot]
        assert shape is not None
        if self._events is not None:
            self._events[slot].synchronize()
        tokens: list[list[int]] = self._places[slot, shape].view(-1, shape[-1]).tolist()
        self._shapes[slot] = None
        return tokens
