"""Attention layers for models of your own, one class for each kind of attention;
`torchpaged.PagedAttention` is the decoder's.

    cache = PagedKVCache([LatentLayerSpec(512, 64)] * num_layers, num_blocks=1024)
    attention = MLAAttention(128, 128, 64, 128, kv_lora_rank=512)
    out = attention(query, kv_c, k_pe, cache[layer], metadata)
"""

from torchpaged.layers.mla import MLAAttention

__all__ = ["MLAAttention"]
