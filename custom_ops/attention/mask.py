"""Which keys a query sees: one definition for the reference, for kernels that are written in torch, and for
code that compares a mask with it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Mask(NamedTuple):
    """The options of attention that hide keys by their positions, as `AttentionCall` has them."""

    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    chunk_size: int = 0

    def sees(self, query: Tensor, key: Tensor, head: Tensor | None = None) -> Tensor:
        """Whether a query at position ``query``, of query head ``head``, may attend to a key at position
        ``key``: bool that broadcasts to the shape of the three. Positions below 0, which see nothing, are the
        caller's to hide. ``head``: None will do for options that are alike for all heads."""
        seen = torch.ones_like(query == key)
        if self.causal:
            seen = seen & (key <= query)
        if self.window_left >= 0:
            seen = seen & (key >= query - self.window_left)
        if self.window_right >= 0:
            seen = seen & (key <= query + self.window_right)
        if self.chunk_size > 0:
            seen = seen & (key // self.chunk_size == query // self.chunk_size)
        return seen


def tree_positions(words: Tensor, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions as the query tokens of one request count them under a tree mask.

    A query token sees the context and those query tokens before it whose bits its word has, and counts
    positions over these alone: the first query token that it sees stands right behind the context. So a node
    of a tree attends as the end of its branch would, were the branch a request of its own.

    Args:
        words: ``[S]`` int64, of the request's query tokens.
        num_keys: the request's length, its query tokens included.

    Returns:
        Positions ``[S]`` of the queries; ``[S, num_keys]`` of the keys, as each query counts them; and bool
        ``[S, num_keys]``: query tokens that the query does not see. All int64 but the last.
    """
    count, device = words.shape[0], words.device
    context = max(num_keys - count, 0)
    token = torch.arange(count, device=device)
    seen = ((words[:, None] >> token) & 1).bool() & (token < token[:, None]) | (token == token[:, None])
    before = seen.long().cumsum(-1) - seen.long()  # of each token, those that are seen before it
    queries = num_keys - count + before.diagonal()
    shown = token[count - (num_keys - context) :]  # those that are keys
    keys = torch.cat(
        [torch.arange(context, device=device).expand(count, -1), num_keys - count + before[:, shown]], dim=1
    )
    hidden = torch.cat([torch.zeros(count, context, dtype=torch.bool, device=device), ~seen[:, shown]], dim=1)
    return queries, keys, hidden
