"""Which keys a query sees: one definition for the reference and for code that compares a mask with it."""

from __future__ import annotations

import torch
from torch import Tensor


def visible_keys(
    positions: Tensor, num_keys: int, causal: bool, window_left: int, window_right: int, chunk_size: int
) -> Tensor:
    """Which keys each query may attend to: bool ``[S, L]`` for query ``positions [S]`` over
    keys ``0..num_keys-1``."""
    query, key = positions[:, None], torch.arange(num_keys, device=positions.device)[None, :]
    return in_reach(query, key, causal, window_left, window_right, chunk_size) & (query >= 0)


def in_reach(
    query: Tensor, key: Tensor, causal: bool, window_left: int, window_right: int, chunk_size: int
) -> Tensor:
    """Whether a query at position ``query`` may attend to a key at position ``key``; bool of the shape that
    the two broadcast to."""
    mask = torch.ones(torch.broadcast_shapes(query.shape, key.shape), dtype=torch.bool, device=key.device)
    if causal:
        mask = mask & (key <= query)
    if window_left >= 0:
        mask = mask & (key >= query - window_left)
    if window_right >= 0:
        mask = mask & (key <= query + window_right)
    if chunk_size > 0:
        mask = mask & (key // chunk_size == query // chunk_size)
    return mask


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
