"""What the last forward did to a pool of states, so that its last tokens can be taken back: the states before
it, and the op over its tokens, which is run once more over those that stay. No matrix product is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: A state op: called with tokens, ``[batch * query_len, ...]`` each, and ``slots``, ``seq_lens``, ``starts``
#: and ``max_query_len`` of their rows.
StateOp = Callable[..., Tensor]


class StatePast:
    """Made before the op of a forward runs; row ``i`` has slot ``i + 1``.

    Args:
        pool: ``[num_slots, ...]``.
        run: the op, over that pool.
        tokens: its arguments with a value per token, ``[batch * query_len, ...]`` each.
        batch, query_len: of the forward.
    """

    def __init__(self, pool: Tensor, run: StateOp, tokens: tuple[Tensor, ...], batch: int, query_len: int):
        self._pool, self._run, self._tokens = pool, run, tokens
        self.batch, self.query_len = batch, query_len
        self._before = pool[1 : batch + 1].clone()

    def take_back(self, count: int, slots: Tensor, seq_lens: Tensor) -> None:
        """Leave the states as without the last ``count`` tokens of each row.

        Args:
            count: at most ``query_len``.
            slots: ``[batch]`` int32.
            seq_lens: ``[batch]`` int32, of the rows without these tokens.
        """
        self._pool[1 : self.batch + 1].copy_(self._before)
        kept = self.query_len - count
        if not kept:
            return
        options: dict[str, Any] = {"dtype": torch.int32, "device": slots.device}
        self._run(
            *(x.unflatten(0, (self.batch, -1))[:, :kept].flatten(0, 1) for x in self._tokens),
            slots=slots,
            seq_lens=seq_lens,
            starts=torch.arange(self.batch + 1, **options) * kept,
            max_query_len=kept,
        )
