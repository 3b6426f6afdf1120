"""Tensor maps of the copy engine: how queries and pools lie in memory, and the boxes that a copy takes.

Those of the pools are made once per pool (addresses, shapes and strides) and kept: pools do not move.
"""

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.cuda.tensor_map import tensor_map
from torchpaged.custom_ops.pools import FP8

_MAX_COORDINATE = 2**31 - 1


def refuse_layout(call: AttentionCall) -> str | None:
    """Why the prefill kernel can't read or write tensors that lie like these, or None. Shapes, strides and
    addresses only."""
    q, k_cache, v_cache, out = call.q, call.k_cache, call.v_cache, call.out
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        unaligned = any(stride * cache.element_size() % 16 for stride in cache.stride()[:3])
        if cache.data_ptr() % 16 or cache.stride(3) != 1 or unaligned:
            return (
                f"{name} with strides {tuple(cache.stride())}: slots that begin at multiples of 16 bytes "
                "are needed"
            )
        box = pool_box(tuple(cache.shape), cache.stride(), 1 if q.dtype in FP8 else 2)
        if box is None:
            return (
                f"{name} with strides {tuple(cache.stride())}: heads side by side, or one behind the other "
                "in a block, are needed"
            )
        if max(box.sizes) > _MAX_COORDINATE or cache.shape[0] * box.where[2] > _MAX_COORDINATE:
            return f"{name} with {cache.shape[0]} blocks"
    for name, rows in (("q", q), ("out", out)):
        unaligned = any(stride * rows.element_size() % 16 for stride in rows.stride()[:2])
        if rows.data_ptr() % 16 or unaligned or rows.stride(2) != 1:
            return (
                f"{name} with strides {tuple(rows.stride())}: heads that begin at multiples of 16 bytes "
                "are needed"
            )
    return None


def square_width(dim: int, itemsize: int = 2) -> int:
    """Columns of a square, which is 8 tokens high; the copy engine swizzles its lines of 128, 64 or 32 bytes.
    ``itemsize``: bytes of a number that is multiplied."""
    return math.gcd(dim * itemsize, 128) // itemsize


@dataclass(frozen=True)
class Box:
    """A tensor map: sizes, strides of all dimensions but the first, in numbers, and the box that one
    copy takes.

    ``where``: coordinates that a head adds to the third and to the fourth dimension, and a block to
    the fourth.
    """

    sizes: list[int]
    strides: list[int]
    box: list[int]
    where: tuple[int, int, int] = (0, 0, 0)


def queries_box(
    shape: tuple[int, int, int], token_stride: int, head_stride: int, group: int, rows: int, itemsize: int = 2
) -> Box:
    """Queries ``[T, num_heads, head_dim]``: a square's columns of the heads of a group of the tokens of a
    tile of ``rows``."""
    tokens, heads, dim = shape
    box = [square_width(dim, itemsize), group, rows // group]
    return Box([dim, heads, tokens], [head_stride, token_stride], box)


def pool_box(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 2) -> Box | None:
    """A cache ``[num_blocks, block_size, num_kv_heads, width]``, of which a box is one head of one block;
    None: not to be seen like this.

    Dimensions: a square's columns; 8 slots; squares; groups of 8 slots. So a block comes as groups of 8
    tokens, each group one square after the other. Heads are further squares if they lie side by side in a
    slot, further groups if they lie one behind the other in a block.
    """
    (blocks, block_size, heads, dim), (block_stride, slot_stride, head_stride, _) = shape, strides
    if not slot_stride:  # expanded: the check refuses it
        return None
    width, groups = square_width(dim, itemsize), block_size // 8
    group_stride = 8 * slot_stride
    if heads == 1 or (
        head_stride >= dim and head_stride % width == 0 and slot_stride >= head_stride * (heads - 1) + dim
    ):
        head_square, head_group = (head_stride // width if heads > 1 else dim // width), 0
    elif head_stride % group_stride == 0:
        head_square, head_group = 0, head_stride // group_stride
    else:
        return None
    in_block = (heads - 1) * head_group + groups
    block_group = block_stride // group_stride if blocks > 1 else in_block
    if (blocks > 1 and block_stride % group_stride) or block_group < in_block:
        return None
    # the last coordinate of a block's groups ends with the pool: a block id that is one too large lies
    # outside, where the engine reads zeros
    sizes = [width, 8, (heads - 1) * head_square + dim // width, (blocks - 1) * block_group + in_block]
    return Box(
        sizes,
        [slot_stride, width, group_stride],
        [width, 8, dim // width, groups],
        (head_square, head_group, block_group),
    )


@functools.lru_cache(maxsize=1024)
def queries_map(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    token_stride: int,
    head_stride: int,
    group: int,
    rows: int,
) -> ctypes.Array[Any]:
    """The tensor map of queries."""
    box = queries_box(shape, token_stride, head_stride, group, rows, dtype.itemsize)
    return _map(address, dtype, box)


@functools.lru_cache(maxsize=4096)
def pool_map(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    fp8_queries: bool = False,
) -> tuple[ctypes.Array[Any], tuple[int, int, int]]:
    """The tensor map of one cache of one layer, and ``Box.where``."""
    box = pool_box(shape, strides, 1 if fp8_queries else 2)
    if box is None:
        raise ValueError(
            f"a pool of shape {shape} with strides {strides} has no box for a block: refuse_layout says so"
        )
    # an fp8 cache that is converted on its way is read as it lies
    return _map(address, dtype, box, swizzled=fp8_queries or dtype.itemsize > 1), box.where


def _map(address: int, dtype: torch.dtype, box: Box, *, swizzled: bool = True) -> ctypes.Array[Any]:
    line = box.box[0] * dtype.itemsize if swizzled else 0
    return tensor_map(address, dtype, box.sizes, box.strides, box.box, swizzle=line)
