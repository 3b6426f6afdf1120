"""Blocks of several pools packed into contiguous rows, and back. No op: its caller runs on the host,
between steps (`torchpaged.cache.host_blocks`)."""

import importlib.util

import torch
from torch import Tensor


class BlockPacking:
    """One launch for all pools where Triton is there and blocks are whole words of 8 bytes; else torch's
    copies, one for each pool.

    Args:
        pools: ``[num_blocks, bytes]`` uint8 each, on one GPU.
        places: where a block of each begins in a row.

    Attributes:
        tables: what the launch reads of the pools on the device; empty without it.
    """

    def __init__(self, pools: list[Tensor], places: list[int]) -> None:
        self._pools, self._places, device = pools, places, pools[0].device
        sizes = [(p.stride(0), p.shape[1], place) for p, place in zip(pools, places, strict=True)]
        words = all(n % 8 == 0 for size in sizes for n in size) and all(p.data_ptr() % 8 == 0 for p in pools)
        self.tables: tuple[Tensor, Tensor] | tuple[()] = ()
        if words and importlib.util.find_spec("triton") is not None:
            bases = torch.tensor([p.data_ptr() for p in pools], dtype=torch.int64, device=device)
            self.tables = bases, torch.tensor(sizes, dtype=torch.int64, device=device) // 8

    def run(self, rows: Tensor, blocks: Tensor, first: int, unpack: bool) -> None:
        """Launch on the current stream.

        Args:
            rows: ``[n, bytes]`` uint8.
            blocks: int64, ids; of row 0 that at ``first``, and so on.
            first: see ``blocks``.
            unpack: from the rows into the pools.
        """
        if self.tables:
            from torchpaged.custom_ops.block_ops.triton.packing import pack_blocks

            pack_blocks(*self.tables, blocks, first, rows.view(torch.int64), unpack)
            return
        index = blocks[first : first + len(rows)]
        for pool, place in zip(self._pools, self._places, strict=True):
            part = rows[:, place : place + pool.shape[1]]
            if unpack:
                pool.index_copy_(0, index, part)
            else:
                part.copy_(pool.index_select(0, index))
