"""The mask "vertical and slash" (`BlockSparse`) in Triton's kernels: which keys rows see, and, where tiles of
keys divide its blocks, how many tiles any row of a kv head sees and where they are.

Keys are then counted without the blocks that no row sees: ordinals, from which `place` finds the keys. First
come the verticals below the slash, ``TILING.verticals`` in each stride, then all blocks from the slash on.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Path(NamedTuple):
    """Where the tiles of keys are that queries of one request and kv head see.

    Attributes:
        slash: first block of the slash of the first query.
        verticals: of blocks before it, those that the kv head sees, or the most that any does.
        first: of a stride's blocks the first that this kv head sees.
        end_key: behind the last key.
    """

    slash: Any
    verticals: Any
    first: Any
    end_key: Any


@triton.jit
def shifts_of(head, SPEC: tl.constexpr):
    """What is added to a block's number to tell the verticals of query heads."""
    STRIDE: tl.constexpr = SPEC.block_sparse.vertical_stride
    OFFSET: tl.constexpr = SPEC.block_sparse.offset % STRIDE
    STEP: tl.constexpr = SPEC.block_sparse.head_step % STRIDE
    return (OFFSET + head // SPEC.block_sparse.heads_per_step * STEP) % STRIDE


@triton.jit
def sees_block(rows, key, SPEC: tl.constexpr):
    """Whether rows see the blocks of keys."""
    BLOCK: tl.constexpr = SPEC.block_sparse.block_size
    block = key // BLOCK
    local = rows.position // BLOCK - block < SPEC.block_sparse.local_blocks
    return local | ((block + rows.shift) % SPEC.block_sparse.vertical_stride == 0)


@triton.jit
def slash_of(position, SPEC: tl.constexpr, TILING: tl.constexpr):
    """``(slash, verticals)`` of a `Path` whose first query is at ``position``."""
    STRIDE: tl.constexpr = SPEC.block_sparse.vertical_stride
    block = tl.maximum(position, 0) // SPEC.block_sparse.block_size
    slash = tl.maximum(block - (SPEC.block_sparse.local_blocks - 1), 0)
    return slash, slash // STRIDE * TILING.verticals + tl.minimum(slash % STRIDE, TILING.verticals)


@triton.jit
def ordinals(low_key, end_key, slash, verticals, SPEC: tl.constexpr, TILING: tl.constexpr):
    """``(first, end)``: between these ordinals are all tiles of keys in ``[low_key, end_key)`` that are seen
    by queries of a `Path`'s ``slash`` and ``verticals``; ``end`` is 0 where ``end_key`` is."""
    BLOCK: tl.constexpr = SPEC.block_sparse.block_size
    hidden = slash - verticals
    block = low_key // BLOCK
    # of the verticals before low_key only whole strides: how many are in the last one depends on the kv head
    before = block // SPEC.block_sparse.vertical_stride * TILING.verticals
    first = tl.where(block >= slash, block - hidden, tl.minimum(before, verticals)) * BLOCK
    return first, tl.where(end_key > 0, end_key - hidden * BLOCK, 0)


@triton.jit
def path_of(position, kv_head, end_key, SPEC: tl.constexpr, TILING: tl.constexpr, OWN: tl.constexpr = False):
    """The `Path` of queries from ``position`` on; without ``TILING.verticals`` ordinals are keys. OWN: with
    the verticals of the kv head itself, so that there is a key for each ordinal."""
    if TILING.verticals > 0:
        STRIDE: tl.constexpr = SPEC.block_sparse.vertical_stride
        STEP: tl.constexpr = SPEC.block_sparse.head_step % STRIDE
        COUNT: tl.constexpr = TILING.verticals
        slash, verticals = slash_of(position, SPEC, TILING)
        # shifts rise from head to head, so that the last head's vertical comes first
        first = (STRIDE - shifts_of(kv_head * SPEC.group + SPEC.group - 1, SPEC)) % STRIDE
        if OWN:
            verticals = slash // STRIDE * COUNT
            for index in tl.static_range(COUNT):
                verticals += ((first + index * STEP) % STRIDE < slash % STRIDE).to(tl.int32)
        path = Path(slash, verticals, first, end_key)
    else:
        path = Path(0, 0, 0, end_key)
    return path


@triton.jit
def place(ordinal, path, SPEC: tl.constexpr, TILING: tl.constexpr):
    """The key at an ordinal that begins a tile; the end, where other kv heads have one vertical more."""
    key = ordinal
    if TILING.verticals > 0:
        BLOCK: tl.constexpr = SPEC.block_sparse.block_size
        STRIDE: tl.constexpr = SPEC.block_sparse.vertical_stride
        COUNT: tl.constexpr = TILING.verticals
        # from one vertical of the kv head's heads to the next
        STEP: tl.constexpr = SPEC.block_sparse.head_step % STRIDE if COUNT > 1 else 1
        n = ordinal // BLOCK
        index = n % COUNT
        # those whose place is past the stride's end come first in it
        behind = tl.minimum((STRIDE - path.first + STEP - 1) // STEP, COUNT)
        wrapped = COUNT - behind
        within = path.first + (index - wrapped) * STEP
        within = tl.where(index < wrapped, path.first + (behind + index) * STEP - STRIDE, within)
        vertical = n // COUNT * STRIDE + within
        in_slash = n >= path.verticals
        block = tl.where(in_slash, path.slash + n - path.verticals, vertical)
        exists = in_slash | (vertical < path.slash)
        key = tl.where(exists, block * BLOCK + ordinal % BLOCK, path.end_key)
    return key
