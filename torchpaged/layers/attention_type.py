"""AttentionType: which of a model's attentions a layer is, in vLLM's words."""

from enum import StrEnum


class AttentionType(StrEnum):
    """What a layer attends to.

    Attributes:
        DECODER: the request's own tokens up to the query, from a paged cache: `torchpaged.PagedAttention`.
        ENCODER: all tokens of the encoder's input, in an encoder-decoder model; nothing is cached.
        ENCODER_ONLY: likewise, in a model without a decoder.
        ENCODER_DECODER: the encoder's tokens, from a paged cache of their own: cross attention.
    """

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"
