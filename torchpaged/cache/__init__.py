"""Where keys and values live: `PagedKVCache` (the tensors) and `BlockPool` (who owns which block)."""

from torchpaged.cache.block_pool import NULL_BLOCK, BlockPool
from torchpaged.cache.kv_cache import KVLayerSpec, LayerKVCache, PagedKVCache

__all__ = ["NULL_BLOCK", "BlockPool", "KVLayerSpec", "LayerKVCache", "PagedKVCache"]
