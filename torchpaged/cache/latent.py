"""The kind ``latent``: one row per token that all heads share, of multi-head latent attention."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.cache.kinds import BlockOps, LayerKind, LayerSpec, register_layer_kind
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

    def __post_init__(self) -> None:
        check_sizes(kv_lora_rank=self.kv_lora_rank, qk_rope_head_dim=self.qk_rope_head_dim)

    def elements_per_token(self) -> int:
        """Numbers stored for one token in this layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

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

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """See `LayerSpec`."""
        return block_size * self.width(dtype) * dtype.itemsize

    def make_pools(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerLatentCache:
        """See `LayerSpec`."""
        shape = (num_blocks, block_size, 1, self.width(dtype))
        return LayerLatentCache(torch.zeros(shape, dtype=dtype, device=device))

    def block_tensors(self, pools: LayerLatentCache) -> dict[str, Tensor]:
        """See `LayerSpec`."""
        return {"kv_cache": pools.kv_cache}

    def copy_blocks(self, pools: LayerLatentCache, block_mapping: Tensor, ops: BlockOps) -> None:
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(index_head_dim=self.index_head_dim)

    def elements_per_token(self) -> int:
        """Numbers stored for one token in this layer."""
        return super().elements_per_token() + self.index_head_dim

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """See `LayerSpec`."""
        scale = 4 if dtype == ROW_DTYPE else 0
        own = block_size * (self.index_head_dim * dtype.itemsize + scale)
        return super().bytes_per_block(block_size, dtype) + own

    def make_pools(  # type: ignore[override]
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerIndexedLatentCache:
        """See `LayerSpec`."""
        slots = num_blocks, block_size
        kv_cache, index_cache = (
            torch.zeros(*slots, 1, width, dtype=dtype, device=device)
            for width in (self.width(dtype), self.index_head_dim)
        )
        scale = torch.zeros(slots, dtype=torch.float32, device=device) if dtype == ROW_DTYPE else None
        return LayerIndexedLatentCache(kv_cache, index_cache, scale)

    def block_tensors(self, pools: LayerIndexedLatentCache) -> dict[str, Tensor]:  # type: ignore[override]
        """See `LayerSpec`."""
        return {name: tensor for name, tensor in pools._asdict().items() if tensor is not None}

    def copy_blocks(
        self,
        pools: LayerIndexedLatentCache,  # type: ignore[override]
        block_mapping: Tensor,
        ops: BlockOps,
    ) -> None:
        """See `LayerSpec`."""
        LayerSpec.copy_blocks(self, pools, block_mapping, ops)


register_layer_kind(LayerKind("latent", LatentLayerSpec))
register_layer_kind(LayerKind("indexed_latent", IndexedLatentLayerSpec))
