"""Argument checks of ``copy_blocks``, shared by the reference, the launchers and the public functions."""

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_device, check_dims, check_dtype, reads_values
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.memory import check_own_elements
from torchpaged.custom_ops.pools import check_pools


def check_copy_blocks(k_cache: Tensor, v_cache: Tensor, block_mapping: Tensor) -> None:
    """Every argument of ``copy_blocks``."""
    check_pools(k_cache, v_cache)
    check_own_elements("k_cache", k_cache)
    check_own_elements("v_cache", v_cache)
    check_dims("block_mapping", block_mapping, None, 2)
    check_dtype("block_mapping", block_mapping, torch.int64)
    check_device(k_cache.device, block_mapping=block_mapping)
    if not reads_values(k_cache.device):
        return
    pairs = [(s, d) for s, d in block_mapping.tolist() if s >= 0 and d >= 0]
    sources, destinations = {s for s, _ in pairs}, [d for _, d in pairs]
    if any(x >= k_cache.shape[0] for pair in pairs for x in pair):
        raise ArgumentError("block_mapping", f"block ids below {k_cache.shape[0]}", str(pairs))
    if len(set(destinations)) < len(destinations) or sources & set(destinations) or 0 in destinations:
        raise ArgumentError(
            "block_mapping", "distinct destinations, none of them a source or the null block 0", str(pairs)
        )
