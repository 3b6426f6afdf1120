"""Blocks of all pools of a cache, packed one behind the other: one launch for all layers. Launched by
``packing.py``."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first", "num_blocks"])  # one compile for all parts
def pack_blocks_kernel(
    first,
    num_blocks,
    bases_ptr,
    sizes_ptr,
    blocks_ptr,
    rows_ptr,
    row_words,
    UNPACK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: (num_blocks * pools,). UNPACK: from the rows into the pools."""
    row, part = (tl.program_id(0) % num_blocks).to(tl.int64), tl.program_id(0) // num_blocks
    pool = tl.load(bases_ptr + part).to(tl.pointer_type(tl.int64))
    stride = tl.load(sizes_ptr + part * 3)
    count = tl.load(sizes_ptr + part * 3 + 1)
    place = tl.load(sizes_ptr + part * 3 + 2)
    pool += tl.load(blocks_ptr + first + row) * stride
    packed = rows_ptr + row * row_words + place
    for start in range(0, count, TILE):
        index = start + tl.arange(0, TILE)
        if UNPACK:
            tl.store(pool + index, tl.load(packed + index, mask=index < count), mask=index < count)
        else:
            tl.store(packed + index, tl.load(pool + index, mask=index < count), mask=index < count)
