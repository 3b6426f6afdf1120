"""Attention as FlashAttention's and torch's documentation describe it, for one request, in float32: what the
functions of compat are compared with.

Written from the documented behaviour alone, and without the library's own reference or masks.
"""

import random

import torch
from torch import Tensor


def documented_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """``q [S, H, D]``, ``k [L, H_kv, D]``, ``v [L, H_kv, D_v]`` -> ``out [S, H, D_v]``, ``lse [H, S]``; rows
    that see nothing: 0 and -inf."""
    num_queries, num_heads, dim = q.shape
    num_keys, num_kv_heads = k.shape[:2]
    out, lse = (
        torch.zeros(num_queries, num_heads, v.shape[-1]),
        torch.full((num_heads, num_queries), float("-inf")),
    )
    scale = dim**-0.5 if scale is None else scale
    for i in range(num_queries):
        at = i + num_keys - num_queries  # bottom right
        seen = [
            j
            for j in range(num_keys)
            if (not causal or j <= at)
            and (window[0] < 0 or j >= at - window[0])
            and (causal or window[1] < 0 or j <= at + window[1])
            and (not chunk or j // chunk == at // chunk)
        ]
        if not seen:
            continue
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = k[seen, kv_head].float() @ q[i, head].float() * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes is not None:
                scores = scores - slopes[head] * torch.tensor([abs(at - j) for j in seen])
            logits = scores if sinks is None else torch.cat([scores, sinks[head : head + 1].float()])
            total = torch.logsumexp(logits, 0)
            lse[head, i] = total
            out[i, head] = torch.exp(scores - total) @ v[seen, kv_head].float()
    return out, lse


class Pools:
    """Keys and values of some requests in shuffled blocks, block 0 among them; what no request owns is NaN,
    and so are table entries' blocks."""

    def __init__(
        self,
        lens: list[int],
        *,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        head_dim_v: int | None = None,
        block_size: int = 8,
        room: int = 0,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        dim_v = head_dim if head_dim_v is None else head_dim_v
        self.k = [torch.randn(n, num_kv_heads, head_dim).to(dtype) for n in lens]
        self.v = [torch.randn(n, num_kv_heads, dim_v).to(dtype) for n in lens]
        counts = [-(-(n + room) // block_size) for n in lens]
        blocks = list(range(sum(counts) + 1))
        rng.shuffle(blocks)
        first = next((i for i, count in enumerate(counts) if count), None)
        if first is not None and blocks.index(0) >= sum(counts):  # block 0 always belongs to a request
            blocks[blocks.index(0)], blocks[0] = blocks[0], 0
        width = max([*counts, 1]) + 1
        self.table = torch.full((len(lens), width), -1, dtype=torch.int32)
        shape = (len(blocks), block_size, num_kv_heads)
        self.k_cache = torch.full((*shape, head_dim), float("nan")).to(dtype)
        self.v_cache = torch.full((*shape, dim_v), float("nan")).to(dtype)
        self.lens = torch.tensor(lens, dtype=torch.int32)
        taken = 0
        for row, (n, count) in enumerate(zip(lens, counts, strict=True)):
            mine = blocks[taken : taken + count]
            taken += count
            self.table[row, :count] = torch.tensor(mine, dtype=torch.int32)
            for j in range(n):
                self.k_cache[mine[j // block_size], j % block_size] = self.k[row][j]
                self.v_cache[mine[j // block_size], j % block_size] = self.v[row][j]

    def stored(self, row: int, n: int) -> tuple[Tensor, Tensor]:
        """The first ``n`` keys and values of a request, read back out of the pools."""
        size = self.k_cache.shape[1]
        at = [(int(self.table[row, j // size]), j % size) for j in range(n)]
        return torch.stack([self.k_cache[b, o] for b, o in at]), torch.stack(
            [self.v_cache[b, o] for b, o in at]
        )


def starts_of(lens: list[int]) -> Tensor:
    """``[0, n0, n0 + n1, ...]`` int32."""
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
