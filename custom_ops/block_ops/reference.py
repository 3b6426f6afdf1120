"""The specification of ``copy_blocks`` in plain torch."""

from torch import Tensor

from torchpaged.custom_ops.block_ops.check import check_copy_blocks


def copy_blocks(k_cache: Tensor, v_cache: Tensor, block_mapping: Tensor) -> None:
    """Copy whole blocks inside a pair of pools: ``cache[destination] = cache[source]``."""
    check_copy_blocks(k_cache, v_cache, block_mapping)
    kept = block_mapping[(block_mapping >= 0).all(-1)]
    for cache in (k_cache, v_cache):
        cache[kept[:, 1]] = cache[kept[:, 0]]
