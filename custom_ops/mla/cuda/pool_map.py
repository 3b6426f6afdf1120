"""The tensor map of a pool of latents, made once per pool and kept: pools do not move."""

import ctypes
import functools
from typing import Any, NamedTuple

import torch

from torchpaged.custom_ops.cuda.tensor_map import tensor_map

_SQUARE = 64  # columns that the copy engine swizzles together, a line of 128 bytes


class PoolBox(NamedTuple):
    """Sizes, strides of all dimensions but the first, in numbers, the box that one copy takes, and what a
    block adds to the last coordinate."""

    sizes: list[int]
    strides: list[int]
    box: list[int]
    block_group: int


def pool_box(shape: tuple[int, ...], strides: tuple[int, ...], squares: int = 0) -> PoolBox | None:
    """A pool ``[num_blocks, block_size, 1, width]``, of which a box is a block, or some ``squares`` (64
    columns) of one; None: not to be seen like this.

    Dimensions: a square's columns; 8 tokens; squares; groups of 8 tokens. So a box comes as groups of 8
    tokens, each group one square after the other.
    """
    (blocks, block_size, _, width), (block_stride, token_stride, _, _) = shape, strides
    if not token_stride:  # expanded: the check refuses it
        return None
    groups, group_stride = block_size // 8, 8 * token_stride
    block_group = block_stride // group_stride if blocks > 1 else groups
    if blocks > 1 and (block_stride % group_stride or block_group < groups):
        return None
    # groups end with the pool: a block id that is one too large lies outside, where the engine reads zeros
    sizes = [_SQUARE, 8, width // _SQUARE, (blocks - 1) * block_group + groups]
    return PoolBox(
        sizes,
        [token_stride, _SQUARE, group_stride],
        [_SQUARE, 8, squares or width // _SQUARE, groups],
        block_group,
    )


@functools.lru_cache(maxsize=4096)
def pool_map(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], squares: int
) -> tuple[ctypes.Array[Any], int]:
    """The tensor map, and `PoolBox.block_group`."""
    found = pool_box(shape, strides, squares)
    if found is None:
        raise ValueError(f"a pool of shape {shape} with strides {strides}: shape.why_not refuses it")
    return tensor_map(address, dtype, *found[:3], swizzle=128), found.block_group
