"""The kind ``kv``: keys and values of every token, in two pools per layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.cache.kinds import BlockShapes, LayerKind, LayerSpec, register_layer_kind
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.pools import FP8, KVScales
from torchpaged.custom_ops.words import one_line


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

    @property
    def scales(self) -> KVScales:
        """Those of the pools, as the ops take them."""
        return KVScales(self.k_scale, self.v_scale)

    def __repr__(self) -> str:
        """Without the values, of which there are millions."""
        shapes = [f"{n}={list(x.shape)}" for n, x in self._asdict().items() if x is not None]
        return one_line(self, *shapes, str(self.k_cache.dtype), f"device={str(self.k_cache.device)!r}")


def layer_pools(kv_cache: LayerKVCache | Sequence[Tensor]) -> LayerKVCache:
    """What was given as the pools of one layer: a `LayerKVCache`, or a pair, with scales behind it or not.

    Raises:
        ArgumentError: it is something else, such as the cache of all layers.
    """
    if isinstance(kv_cache, LayerKVCache):
        return kv_cache
    if not isinstance(kv_cache, (tuple, list)) or not 2 <= len(kv_cache) <= 4:
        raise ArgumentError(
            "kv_cache",
            "one layer's pools, a LayerKVCache or (k_cache, v_cache)",
            type(kv_cache).__name__,
            "pass cache[layer] of a PagedKVCache",
        )
    return LayerKVCache(*kv_cache)


@dataclass(frozen=True)
class KVLayerSpec(LayerSpec):
    """What one layer stores per token: ``num_kv_heads`` keys of ``head_dim`` and values of ``head_dim_v``
    numbers."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None

    POOLS = LayerKVCache

    def __post_init__(self) -> None:
        check_sizes(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        if self.head_dim_v is not None:
            check_sizes(head_dim_v=self.head_dim_v)

    @property
    def value_dim(self) -> int:
        """Width of a value: ``head_dim_v``, or ``head_dim`` where that is None."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    def block_shapes(self, block_size: int, dtype: torch.dtype) -> BlockShapes:
        """See `LayerSpec`."""
        rows = block_size, self.num_kv_heads
        return {"k_cache": ((*rows, self.head_dim), dtype), "v_cache": ((*rows, self.value_dim), dtype)}

    def make_pools(self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Any:
        """See `LayerSpec`; fp8 pools come with scales of 1.0."""
        pools = super().make_pools(num_blocks, block_size, dtype, device)
        if dtype not in FP8:
            return pools
        return pools._replace(
            **{name: torch.ones(1, dtype=torch.float32, device=device) for name in KVScales._fields}
        )

    def block_tensors(self, pools: LayerKVCache) -> dict[str, Tensor]:
        """See `LayerSpec`."""
        return {"k_cache": pools.k_cache, "v_cache": pools.v_cache}

    def copy_blocks(self, pools: LayerKVCache, block_mapping: Tensor, ops: BackendOps) -> None:
        """See `LayerSpec`; by the op ``copy_blocks``."""
        ops.copy_blocks(pools.k_cache, pools.v_cache, block_mapping)


register_layer_kind(LayerKind("kv", KVLayerSpec))
