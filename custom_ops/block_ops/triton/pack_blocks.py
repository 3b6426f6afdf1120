"""Blocks of all pools of a cache, packed one behind the other: one launch for all layers."""

import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.triton.kernel_store import launch_kernel

_TILE = 1024  # words of 8 bytes
_WARPS = 2  # the way back runs beside decode steps: as fast as with 4, and these lose less


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr"])  # a part of them may begin anywhere
def pack_blocks_kernel(
    bases_ptr, sizes_ptr, blocks_ptr, rows_ptr, row_words, UNPACK: tl.constexpr, TILE: tl.constexpr
):
    """Grid: (blocks, pools). UNPACK: from the rows into the pools."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pool = tl.load(bases_ptr + part).to(tl.pointer_type(tl.int64))
    stride = tl.load(sizes_ptr + part * 3)
    count = tl.load(sizes_ptr + part * 3 + 1)
    place = tl.load(sizes_ptr + part * 3 + 2)
    pool += tl.load(blocks_ptr + row) * stride
    packed = rows_ptr + row * row_words + place
    for first in range(0, count, TILE):
        index = first + tl.arange(0, TILE)
        if UNPACK:
            tl.store(pool + index, tl.load(packed + index, mask=index < count), mask=index < count)
        else:
            tl.store(packed + index, tl.load(pool + index, mask=index < count), mask=index < count)


def pack_blocks(bases: Tensor, sizes: Tensor, blocks: Tensor, rows: Tensor, unpack: bool = False) -> None:
    """Copy blocks out of pools into rows, or back.

    Args:
        bases: ``[num_pools]`` int64, the pools' addresses.
        sizes: ``[num_pools, 3]`` int64, in words of 8 bytes: from a block to the next one, of a block, and
            where it stands in a row.
        blocks: ``[n]`` int64, block ids.
        rows: ``[n, words]`` int64, one block of all pools in each.
        unpack: from the rows into the pools.
    """
    launch_kernel(
        pack_blocks_kernel,
        (blocks.shape[0], bases.shape[0]),
        bases,
        sizes,
        blocks,
        rows,
        rows.shape[1],
        UNPACK=unpack,
        TILE=_TILE,
        num_warps=_WARPS,
    )
