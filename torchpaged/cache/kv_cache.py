"""PagedKVCache: one pair of block pools per attention layer, sized by count or by a memory budget.

    cache = PagedKVCache.uniform(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, num_blocks=512, dtype=torch.bfloat16)
    print(cache.describe())          # 512 blocks of 16 tokens = 8176 tokens, 0.18 GiB (23040 bytes per token)
    k_cache, v_cache = cache[0][:2]  # [num_blocks, block_size, num_kv_heads, head_dim]

Build it outside ``torch.inference_mode()``: an inference tensor cannot be written under plain ``no_grad``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class LayerKVCache(NamedTuple):
    """The pools of one layer, as `PagedAttention` takes them.

    Attributes:
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``.
        v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim_v]``.
        k_scale, v_scale: float32, one value or one per kv head, for fp8 pools; None otherwise.
    """

    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True)
class KVLayerSpec:
    """What one layer stores per token: ``num_kv_heads`` keys of ``head_dim`` and values of ``head_dim_v`` numbers."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        if min(self.num_kv_heads, self.head_dim, self.value_dim) < 1:
            raise ArgumentError("num_kv_heads, head_dim", "positive sizes", f"{self.num_kv_heads}, {self.head_dim}, {self.head_dim_v}")

    @property
    def value_dim(self) -> int:
        """Width of a value: ``head_dim_v``, or ``head_dim`` where that is None."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    def elements_per_token(self) -> int:
        """Numbers stored for one token in this layer."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


class PagedKVCache:
    """The KV pools of a model.

    Args:
        layers: one `KVLayerSpec` per attention layer.
        block_size: tokens per block. (Some projects call the context length "block size"; here it is the page.)
        num_blocks: blocks per layer, the null block 0 included. Give this or ``memory_budget``.
        memory_budget: bytes that all pools together may take.
        dtype: of the pools; an fp8 dtype makes the pools carry scales of 1.0 unless given.
        device: where the pools live.
        mark_static: tell torch.compile that the addresses never move, so that its CUDA graphs need no copies.

    Raises:
        ArgumentError: neither or both sizes given, or the budget holds fewer than 2 blocks.
    """

    def __init__(
        self,
        layers: Sequence[KVLayerSpec],
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_budget: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        mark_static: bool = True,
    ) -> None:
        if not layers:
            raise ArgumentError("layers", "at least one layer", "none")
        if block_size < 1:
            raise ArgumentError("block_size", "at least 1 token", str(block_size))
        if not dtype.is_floating_point:
            raise ArgumentError("dtype", "a floating point dtype", str(dtype))
        if (num_blocks is None) == (memory_budget is None):
            raise ArgumentError("num_blocks", "exactly one of num_blocks and memory_budget", f"{num_blocks} and {memory_budget}")
        self.layers, self.block_size, self.dtype, self.device = tuple(layers), block_size, dtype, torch.device(device)
        if num_blocks is None:
            assert memory_budget is not None
            num_blocks = memory_budget // (self.bytes_per_token * block_size)
            if num_blocks < 2:
                raise ArgumentError(
                    "memory_budget", f"at least {2 * self.bytes_per_token * block_size} bytes (2 blocks)", str(memory_budget)
                )
        if num_blocks < 2:
            raise ArgumentError("num_blocks", "at least 2 (block 0 is the null block)", str(num_blocks))
        self.num_blocks, self._marked = num_blocks, mark_static
        self._pools = [self._make_layer(spec) for spec in self.layers]
        self._mark_static()

    def _mark_static(self) -> None:
        if self._marked:
            for pool in self._pools:
                for tensor in pool[:2]:
                    # guard=False: a new cache object must not recompile the model
                    torch._dynamo.mark_static_address(tensor, guard=False)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, with all that is stored: pools as bytes, since pickle knows no fp8."""
        return self.__dict__ | {"_pools": [(*(t.detach().view(torch.uint8) for t in pool[:2]), *pool[2:]) for pool in self._pools]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pools = [LayerKVCache(*(t.view(self.dtype) for t in pool[:2]), *pool[2:]) for pool in state["_pools"]]
        self.device = self._pools[0].k_cache.device  # torch.load may have moved it
        self._mark_static()

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_budget: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> PagedKVCache:
        """A cache whose layers are all alike."""
        spec = KVLayerSpec(num_kv_heads, head_dim, head_dim_v)
        return cls(
            [spec] * num_layers, block_size=block_size, num_blocks=num_blocks, memory_budget=memory_budget, dtype=dtype, device=device
        )

    def _make_layer(self, spec: KVLayerSpec) -> LayerKVCache:
        with torch.inference_mode(False):
            shape = (self.num_blocks, self.block_size, spec.num_kv_heads)
            k_cache = torch.zeros(*shape, spec.head_dim, dtype=self.dtype, device=self.device)
            v_cache = torch.zeros(*shape, spec.value_dim, dtype=self.dtype, device=self.device)
            if self.dtype not in FP8_DTYPES:
                return LayerKVCache(k_cache, v_cache)
            k_scale, v_scale = (torch.ones(1, dtype=torch.float32, device=self.device) for _ in range(2))
            return LayerKVCache(k_cache, v_cache, k_scale, v_scale)

    def __getitem__(self, layer: int) -> LayerKVCache:
        return self._pools[layer]

    def __len__(self) -> int:
        return len(self._pools)

    def __iter__(self) -> Iterator[LayerKVCache]:
        return iter(self._pools)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all layers together."""
        return sum(spec.elements_per_token() for spec in self.layers) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes all pools take."""
        return self.num_blocks * self.block_size * self.bytes_per_token

    @property
    def num_tokens(self) -> int:
        """Tokens that fit (the null block holds none)."""
        return (self.num_blocks - 1) * self.block_size

    def describe(self) -> str:
        """The memory arithmetic in one line."""
        return (
            f"{self.num_blocks} blocks of {self.block_size} tokens = {self.num_tokens} tokens in {len(self)} layers, "
            f"{self.num_bytes / 2**30:.3f} GiB ({self.bytes_per_token} bytes per token, {str(self.dtype).removeprefix('torch.')})"
        )
