"""Batches whose rows do not follow one another: padded strides, heads before slots, addresses aligned to no
more than a number.

What lies between the rows holds NaN, like everything that a test did not write, so that a kernel that strays
is seen.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchpaged.custom_ops.pools import FP8
from torchpaged.testing.batches import Batch


@dataclass(frozen=True)
class PoolLayout:
    """Where the numbers of a pool ``[num_blocks, block_size, num_kv_heads, head_dim]`` lie; the last
    dimension is always contiguous.

    Attributes:
        heads_first: physically ``[num_blocks, num_kv_heads, block_size, head_dim]``.
        slot_padding: numbers between one slot and the next.
        head_padding: numbers between one head and the next.
        offset: numbers before the first one; the address is aligned to the dtype's size and, unless by
            chance, to no more.
    """

    heads_first: bool = False
    slot_padding: int = 0
    head_padding: int = 0
    offset: int = 0

    def strides(self, block_size: int, num_kv_heads: int, width: int) -> tuple[int, int, int, int]:
        """Strides of blocks, slots, heads and numbers, in numbers."""
        if self.heads_first:
            slot = width + self.slot_padding
            head = block_size * slot + self.head_padding
            return num_kv_heads * head, slot, head, 1
        head = width + self.head_padding
        slot = num_kv_heads * head + self.slot_padding
        return block_size * slot, slot, head, 1


def strided(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    offset: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """A tensor of ``shape`` and ``strides`` (in numbers), ``offset`` numbers into memory that holds NaN
    in ``dtype``."""
    needed = (
        offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        if math.prod(shape)
        else offset
    )
    memory = torch.full(
        (needed,), float("nan"), dtype=torch.float32 if dtype in FP8 else dtype, device=device
    ).to(dtype)
    return memory.as_strided(shape, strides, offset)


def laid_out(batch: Batch, layout: PoolLayout, q_padding: tuple[int, int, int]) -> Batch:
    """A batch on the CPU with its pools in this layout, and ``q_padding`` numbers between tokens of q,
    between heads, and before the first."""
    pools = {}
    for name in ("k_cache", "v_cache"):
        pool = getattr(batch, name)
        strides = layout.strides(*pool.shape[1:])
        pools[name] = strided(tuple(pool.shape), strides, pool.dtype, layout.offset).copy_(pool)
    num_heads, width = batch.q.shape[1:]
    head = width + q_padding[1]
    strides = num_heads * head + q_padding[0], head, 1
    q = strided(tuple(batch.q.shape), strides, batch.q.dtype, q_padding[2]).copy_(batch.q)
    return replace(batch, q=q, **pools)


def moved(batch: Batch, device: torch.device | str) -> Batch:
    """A batch on another device, with what lies between the rows; `Batch.to` closes the gaps."""
    kept = {name: clone_storage(getattr(batch, name), device) for name in ("q", "k_cache", "v_cache")}
    return replace(batch.to(device), **kept)


def memory_of(tensor: Tensor) -> Tensor:
    """The whole memory that ``tensor`` is a view of, one-dimensional and of its dtype: what lies before,
    between and behind included."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def clone_storage(tensor: Tensor, device: torch.device | str | None = None) -> Tensor:
    """A copy with the same strides and offset, and of what lies between the rows; `Tensor.to` would close
    the gaps."""
    memory = memory_of(tensor).to(device=device, copy=True)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
