"""Attention layers for models of your own, one class for each kind of attention;
`torchpaged.PagedAttention` is the decoder's.

    encoder = EncoderOnlyAttention(num_heads=8, head_dim=64)
    out = encoder(query, key, value, encoder_metadata([7, 3]))       # packed rows, no cache, no padding

    cross = CrossAttention(num_heads=8, head_dim=64)
    rows = cache.allocate(2)                                         # a PagedKVCache of the encoder's keys
    out = cross(query, key, value, cache[0], rows.cross([1, 1], written=rows.append([7, 3])))
    out = cross(query, None, None, cache[0], rows.cross([1, 1]))     # later steps

    cache = PagedKVCache([LatentLayerSpec(512, 64)] * num_layers, num_blocks=1024)
    attention = MLAAttention(128, 128, 64, 128, kv_lora_rank=512)
    out = attention(query, kv_c, k_pe, cache[layer], metadata)

`CrossMetadata` is what ``rows.cross`` gives; `encoder_metadata` makes a batch of whole sequences. A backend
that can't do what a layer needs is refused where the layer is made.
"""

from torchpaged.layers.encoders import AttentionType, CrossAttention, EncoderAttention, EncoderOnlyAttention
from torchpaged.layers.mla import MLAAttention
from torchpaged.layers.of_type import ChunkedLocalAttention, attention_layer
from torchpaged.metadata import encoder_metadata
from torchpaged.metadata.encoder import CrossMetadata

__all__ = [
    "AttentionType",
    "ChunkedLocalAttention",
    "CrossAttention",
    "CrossMetadata",
    "EncoderAttention",
    "EncoderOnlyAttention",
    "MLAAttention",
    "attention_layer",
    "encoder_metadata",
]
