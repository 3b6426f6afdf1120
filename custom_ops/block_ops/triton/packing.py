"""Packing blocks in Triton: the launch. Where its code is stored Triton is not imported."""

from torch import Tensor

from torchpaged.custom_ops.triton.kernel_store import Launch
from torchpaged.custom_ops.triton.stored_kernel import KernelRef

_KERNEL = KernelRef(
    "block_ops.triton.pack_blocks", "pack_blocks_kernel", unspecialised=("first", "num_blocks")
)
#: TILE: words of 8 bytes. The way back runs beside decode steps: 2 warps are as fast as 4, and these lose
#: less.
_OPTIONS = {"TILE": 1024, "num_warps": 2}


def pack_blocks(
    bases: Tensor, sizes: Tensor, blocks: Tensor, first: int, rows: Tensor, unpack: bool = False
) -> None:
    """Copy blocks out of pools into rows, or back, in Triton.

    Args:
        bases: ``[num_pools]`` int64, the pools' addresses.
        sizes: ``[num_pools, 3]`` int64, in words of 8 bytes: from a block to the next one, of a block, and
            where it stands in a row.
        blocks: int64, block ids; those from ``first`` on are of the rows.
        first: see ``blocks``.
        rows: ``[n, words]`` int64, one block of all pools in each.
        unpack: from the rows into the pools.
    """
    count, words = rows.shape
    arguments = first, count, bases, sizes, blocks, rows, words
    Launch(_KERNEL, (count * bases.shape[0],), arguments, {"UNPACK": unpack, **_OPTIONS})()
