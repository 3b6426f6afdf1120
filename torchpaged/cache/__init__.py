"""Where keys and values live: `PagedKVCache` (the tensors), `BlockPool` (the holders of each block), and the
kinds of layers that there are.

kinds.py         what a kind of layer cache is, and the registry
kv.py            the usual kind, `KVLayerSpec`: keys and values; a layer's pools are a `LayerKVCache`
latent.py        the latents of multi-head latent attention, `LatentLayerSpec`
state.py         one state per request, `StateLayerSpec`: gated delta nets, Mamba 2, convolutions; a layer's
                 pools are `LayerStates`
kv_cache.py      the pools of a model, of layers of any kind
block_pool.py    free blocks and holders, host data only
requests.py      requests that grow and fork, and the metadata of their steps
host_blocks.py   `HostBlocks`: blocks in host memory, copied there and back (swap)
host_copies.py   the memory, buffers and streams of these copies on a GPU
host_tier.py     `HostTier`: where a `PrefixCache` has copies of the blocks that the pool gave up
disk_blocks.py   `DiskBlocks`: blocks in a file, with checksums, written and read by threads; the way back
disk_tier.py     `DiskTier`: a `HostTier` whose oldest copies go on to such a file
row_blocks.py    the blocks of a batch's rows, and what they share
prefix_cache.py  `PrefixCache`: what blocks hold, by tokens, for texts that begin alike
prefix_books.py  its books and counters, `PrefixCacheStats`
runs.py          which blocks hold which tokens, beneath these
checkpoints.py   `CheckpointedPrefixCache`: a `PrefixCache` for layers that keep a state or a ring per request
cached_text.py   one request's text, and how far it is known: `CachedText`; `TieredText` with a `HostTier`
eviction.py      which of these blocks are given up first: an `EvictionPolicy`, `LRU` by default, and a `Pin`
snapshots.py     what a `PrefixCache` knows, in a safetensors file
rolling.py       `RollingBlocks`: rings of blocks, for layers with a sliding window
"""

from torchpaged.cache.block_pool import BlockPool
from torchpaged.cache.cached_text import CachedText
from torchpaged.cache.checkpoints import CheckpointedPrefixCache
from torchpaged.cache.eviction import LRU, EvictionPolicy, Pin
from torchpaged.cache.host_blocks import HostBlocks
from torchpaged.cache.host_tier import HostTier
from torchpaged.cache.kinds import LayerKind, LayerSpec, register_layer_kind
from torchpaged.cache.kv import KVLayerSpec, LayerKVCache
from torchpaged.cache.kv_cache import PagedKVCache
from torchpaged.cache.latent import LatentLayerSpec
from torchpaged.cache.prefix_books import PrefixCacheStats
from torchpaged.cache.prefix_cache import PrefixCache
from torchpaged.cache.requests import CacheRequests
from torchpaged.cache.rolling import RollingBlocks
from torchpaged.cache.state import LayerStates, StateLayerSpec

__all__ = [
    "LRU",
    "BlockPool",
    "CacheRequests",
    "CachedText",
    "CheckpointedPrefixCache",
    "EvictionPolicy",
    "HostBlocks",
    "HostTier",
    "KVLayerSpec",
    "LatentLayerSpec",
    "LayerKVCache",
    "LayerKind",
    "LayerSpec",
    "LayerStates",
    "PagedKVCache",
    "Pin",
    "PrefixCache",
    "PrefixCacheStats",
    "RollingBlocks",
    "StateLayerSpec",
    "register_layer_kind",
]
