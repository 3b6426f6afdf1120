"""The kind ``latent``: one row per token that all heads share, of multi-head latent attention."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchpaged.cache.kinds import BlockShapes, LayerKind, LayerSpec, register_layer_kind
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, row_bytes


class LayerLatentCache(NamedTuple):
    """The pool of one layer, as the op ``mla_attention`` takes it.

    Attributes:
        kv_cache: ``[num_blocks, block_size, 1, kv_lora_rank + qk_rope_head_dim]``: a token's
            normalised latent, then its rotated key. Or, of float8_e4m3fn, rows of bytes with scales of their
            own (`torchpaged.custom_ops.mla.fp8_rows`).
    """

    kv_cache: Tensor


@dataclass(frozen=True)
class LatentLayerSpec(LayerSpec):
    """What one layer stores per token: a latent of ``kv_lora_rank`` numbers and a rotated key of
    ``qk_rope_head_dim``, whatever the number of heads is."""

    kv_lora_rank: int
    qk_rope_head_dim: int

    POOLS: ClassVar[Any] = LayerLatentCache

    def __post_init__(self) -> None:
        check_sizes(kv_lora_rank=self.kv_lora_rank, qk_rope_head_dim=self.qk_rope_head_dim)

    def width(self, dtype: torch.dtype) -> int:
        """Of a row of a pool of ``dtype``.

        Raises:
            ArgumentError: float8_e5m2, or with float8_e4m3fn a rank that is no multiple of 4 or an odd rope.
        """
        rank, rope = self.kv_lora_rank, self.qk_rope_head_dim
        if dtype != ROW_DTYPE:
            if dtype.itemsize == 1:
                raise ArgumentError("dtype", f"{ROW_DTYPE} or 16 bits or more for latents", str(dtype))
            return rank + rope
        if rank % 4 or rope % 2:
            raise ArgumentError(
                "dtype", "16 bits or more for latents of such columns", str(dtype), f"{rank} + {rope} columns"
            )
        return row_bytes(rank, rope)

    def block_shapes(self, block_size: int, dtype: torch.dtype) -> BlockShapes:
        """See `LayerSpec`."""
        return {"kv_cache": ((block_size, 1, self.width(dtype)), dtype)}

    def copy_blocks(self, pools: LayerLatentCache, block_mapping: Tensor, ops: BackendOps) -> None:
        """See `LayerSpec`; by the op ``copy_blocks``, latents and rotated keys as a pair of pools."""
        rank = self.kv_lora_rank
        ops.copy_blocks(pools.kv_cache[..., :rank], pools.kv_cache[..., rank:], block_mapping)


class LayerIndexedLatentCache(NamedTuple):
    """The pools of one layer of sparse attention.

    Attributes:
        kv_cache: as of `LayerLatentCache`.
        index_cache: ``[num_blocks, block_size, 1, index_head_dim]``, the indexer's key of each token, as the
            op ``index_logits`` takes it.
        index_scale: ``[num_blocks, block_size]`` float32, a scale of each such key, where the pools are of
            float8_e4m3fn; None otherwise.
    """

    kv_cache: Tensor
    index_cache: Tensor
    index_scale: Tensor | None = None


@dataclass(frozen=True)
class IndexedLatentLayerSpec(LatentLayerSpec):
    """What one layer of sparse attention stores per token: that of `LatentLayerSpec`, and a key of
    ``index_head_dim`` numbers, by which its indexer selects."""

    index_head_dim: int

    POOLS = LayerIndexedLatentCache

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(index_head_dim=self.index_head_dim)

    def block_shapes(self, block_size: int, dtype: torch.dtype) -> BlockShapes:
        """See `LayerSpec`."""
        found = super().block_shapes(block_size, dtype)
        found["index_cache"] = (block_size, 1, self.index_head_dim), dtype
        if dtype == ROW_DTYPE:
            found["index_scale"] = (block_size,), torch.float32
        return found

    def copy_blocks(
        self,
        pools: LayerIndexedLatentCache,  # type: ignore[override]
        block_mapping: Tensor,
        ops: BackendOps,
    ) -> None:
        """See `LayerSpec`."""
        LayerSpec.copy_blocks(self, pools, block_mapping, ops)


register_layer_kind(LayerKind("latent", LatentLayerSpec))
register_layer_kind(LayerKind("indexed_latent", IndexedLatentLayerSpec))
