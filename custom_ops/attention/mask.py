"""Which keys a query sees: one definition for the reference and for whoever compares a mask with it."""

from __future__ import annotations

import torch
from torch import Tensor


def visible_keys(
    positions: Tensor, num_keys: int, causal: bool, window_left: int, window_right: int, chunk_size: int
) -> Tensor:
    """Which keys each query may attend to: bool ``[S, L]`` for query ``positions [S]`` over
    keys ``0..num_keys-1``."""
    query, key = positions[:, None], torch.arange(num_keys, device=positions.device)[None, :]
    mask = (query >= 0).expand(-1, num_keys)
    if causal:
        mask = mask & (key <= query)
    if window_left >= 0:
        mask = mask & (key >= query - window_left)
    if window_right >= 0:
        mask = mask & (key <= query + window_right)
    if chunk_size > 0:
        mask = mask & (key // chunk_size == query // chunk_size)
    return mask
