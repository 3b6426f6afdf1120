"""Packed queries over packed or paged keys, as FlashAttention and torch's ``varlen_attn`` both take them.
Keys and values without a block table are seen as pools of blocks: views of the caller's memory, never copies.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchpaged.compat.arguments import check_out, is_eager
from torchpaged.compat.call import Descales, PackedCall
from torchpaged.custom_ops.batch_values import check_starts
from torchpaged.custom_ops.checks import check_dims, check_dtype, check_tensors, is_int, reads_values
from torchpaged.custom_ops.errors import ArgumentError

#: A contiguous cache is cut into blocks of at most so many tokens.
MAX_BLOCK_SIZE = 128


def packed_pools(k: Tensor, v: Tensor, starts: Tensor, max_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed keys and values of requests, as pools of blocks of one token.

    Args:
        k: ``[total_k, num_kv_heads, head_dim]``.
        v: ``[total_k, num_kv_heads, head_dim_v]``.
        starts: ``[num_reqs]`` int32, where each request's keys begin.
        max_len: upper bound of the keys of a request; the width of the table.

    Returns:
        ``(k_cache, v_cache, block_table)``. The table's entries behind a request's last key name any token,
        and are never read.
    """
    columns = torch.arange(max(max_len, 1), dtype=torch.int32, device=k.device)
    table = (starts[:, None] + columns).clamp(max=k.shape[0] - 1)
    return k.unsqueeze(1), v.unsqueeze(1), table


def rows_as_pools(
    k_cache: Tensor, v_cache: Tensor, batch_idx: Tensor | None, num_reqs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A cache of one row per request, as pools.

    Args:
        k_cache: ``[batch_size_cache, seqlen_cache, num_kv_heads, head_dim]``.
        v_cache: ``[batch_size_cache, seqlen_cache, num_kv_heads, head_dim_v]``.
        batch_idx: ``[num_reqs]`` int32, the row of each request; None: the first rows, in order.
        num_reqs: requests of the call.

    Returns:
        ``(k_cache, v_cache, block_table)``.

    Raises:
        ArgumentError: fewer rows than requests, or rows that no view can cut into blocks of one size.
    """
    rows, length = k_cache.shape[:2]
    if not torch.compiler.is_compiling():
        check_dims("v_cache", v_cache, rows, length, k_cache.shape[2], None)
        if batch_idx is None and rows < num_reqs:
            raise ArgumentError(
                "k_cache",
                f"at least {num_reqs} rows, one per request",
                str(list(k_cache.shape)),
                "pass page_table or cache_batch_idx",
            )
    block_size = math.gcd(length, MAX_BLOCK_SIZE)
    if block_size < 16 or not (_is_flat(k_cache) and _is_flat(v_cache)):
        block_size = length  # a row is one block
    per_row = length // block_size
    first = (
        torch.arange(num_reqs, dtype=torch.int32, device=k_cache.device)
        if batch_idx is None
        else batch_idx.to(torch.int32)
    )
    table = first[:, None] * per_row + torch.arange(per_row, dtype=torch.int32, device=k_cache.device)
    if per_row == 1:
        return k_cache, v_cache, table
    k, v = (cache.unflatten(1, (per_row, block_size)).flatten(0, 1) for cache in (k_cache, v_cache))
    return k, v, table


def _is_flat(cache: Tensor) -> bool:
    """Whether the rows follow each other at the distance of their tokens, so that rows and blocks can be one
    dimension."""
    return cache.shape[0] == 1 or cache.stride(0) == cache.shape[1] * cache.stride(1)


@dataclass
class PackedTokens:
    """Which tokens attend to which, in FlashAttention's words: see
    `torchpaged.compat.flash_attn_varlen_func`."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: Tensor | None
    block_table: Tensor | None

    def check(self) -> None:
        """What only these functions ask; the rest is checked with the op's arguments."""
        check_tensors(q=self.q, k=self.k, v=self.v, cu_seqlens_q=self.cu_seqlens_q)
        check_dims("q", self.q, None, None, None)
        check_dims("cu_seqlens_q", self.cu_seqlens_q, None)
        for name in ("max_seqlen_q", "max_seqlen_k"):
            size = getattr(self, name)
            if not is_int(size) or size < 0:
                raise ArgumentError(name, "an int, an upper bound of the lengths", repr(size))
        num_reqs = self.cu_seqlens_q.shape[0] - 1
        for name, lens, count in (
            ("cu_seqlens_k", self.cu_seqlens_k, num_reqs + 1),
            ("seqused_k", self.seqused_k, num_reqs),
        ):
            if lens is not None:
                check_tensors(**{name: lens})
                check_dims(name, lens, count)
                check_dtype(name, lens, torch.int32)
        if self.block_table is None:
            check_dims("k", self.k, None, None, None)
            check_dims("v", self.v, *self.k.shape[:2], None)
        else:
            check_tensors(block_table=self.block_table)
            check_dims("k", self.k, None, None, None, None)
        if self.cu_seqlens_k is not None and reads_values(self.q.device):
            end = self.k.shape[0] if self.block_table is None else 2**31
            check_starts("cu_seqlens_k", self.cu_seqlens_k, end)

    def lens(self) -> Tensor:
        """``[num_reqs]`` int32: keys of each request."""
        if self.seqused_k is not None:
            return self.seqused_k
        if self.cu_seqlens_k is None:
            raise ArgumentError("seqused_k", "the keys of each request, together with a block_table", "None")
        return self.cu_seqlens_k.diff()

    def run(
        self,
        options: dict[str, Any],
        out: Tensor | None,
        return_lse: bool,
        descales: Descales = (None, None, None),
    ) -> Any:
        """Attend; returns what the functions return."""
        k_cache, v_cache, table = self.k, self.v, self.block_table
        if table is None:
            if self.cu_seqlens_k is None:
                expected = "where each request's keys lie, since they are packed"
                raise ArgumentError("cu_seqlens_k", expected, "None", "or pass block_table and seqused_k")
            k_cache, v_cache, table = packed_pools(self.k, self.v, self.cu_seqlens_k[:-1], self.max_seqlen_k)
        batch = table, self.lens(), self.cu_seqlens_q
        same_lens = self.cu_seqlens_k is self.cu_seqlens_q and self.seqused_k is None
        pools = k_cache, v_cache
        call = PackedCall(self.q, pools, batch, self.max_seqlen_q, options, descales, same_lens)
        if out is not None and is_eager():
            check_out(out, self.q, self.v.shape[-1])
        result, lse = call.run(out, return_lse)
        return result if lse is None else (result, lse.transpose(0, 1).contiguous())
