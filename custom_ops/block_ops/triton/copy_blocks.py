"""copy_blocks: one program copies a piece of one block."""

import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.block_ops.check import check_copy_blocks
from torchpaged.custom_ops.triton.cache_writes import end_write
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import launches_early, require_launchable
from torchpaged.custom_ops.triton.records import Pool

_PIECE = 1024  # numbers per program


@triton.jit
def copy_blocks_kernel(
    pool,
    mapping_ptr,
    map_pair,
    map_side,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
):
    """``pool``: `Pool`. Grid: (num_pairs, pieces of a block). SIZE: numbers in a block. PDL: the kernel
    behind may be launched early."""
    pair = tl.program_id(0).to(tl.int64)
    source = tl.load(mapping_ptr + pair * map_pair)
    destination = tl.load(mapping_ptr + pair * map_pair + map_side)
    if (source >= 0) & (destination >= 0):
        index = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
        inner = (
            (index // (NUM_HEADS * DIM)).to(tl.int64) * pool.slot
            + (index // DIM % NUM_HEADS).to(tl.int64) * pool.head
            + index % DIM
        )
        values = tl.load(pool.ptr + source * pool.block + inner, mask=index < SIZE)
        tl.store(pool.ptr + destination * pool.block + inner, values, mask=index < SIZE)
    end_write(False, PDL)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, block_mapping: Tensor) -> None:
    """Launch; arguments as in ``custom_ops/block_ops/schema.py``."""
    require_launchable(k_cache)
    check_copy_blocks(k_cache, v_cache, block_mapping)
    if not block_mapping.shape[0]:
        return
    for cache in (k_cache, v_cache):
        _, block_size, num_heads, dim = cache.shape
        size = block_size * num_heads * dim
        launch_kernel(
            copy_blocks_kernel,
            (block_mapping.shape[0], triton.cdiv(size, _PIECE)),
            *(Pool.of(cache, None), block_mapping, *block_mapping.stride()),
            NUM_HEADS=num_heads,
            DIM=dim,
            SIZE=size,
            PIECE=_PIECE,
            PDL=launches_early(cache.device),
        )
