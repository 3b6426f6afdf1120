"""Attention within chunks, and the layer of an `AttentionType`."""

from typing import Any

from torchpaged.attention import PagedAttention
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.layers.encoders import AttentionType, CrossAttention, EncoderAttention, EncoderOnlyAttention


class ChunkedLocalAttention(PagedAttention):
    """`PagedAttention` whose queries see the keys of their own chunk alone, up to themselves (Llama 4).

    Args:
        num_heads, head_dim: as for `PagedAttention`.
        chunk_size: positions of a chunk, at least 1. Position 0 begins one.
        options: all others of `PagedAttention`.

    Raises:
        ArgumentError: sizes that don't fit together.
        BackendUnavailableError: the named backend can't run this attention; the message has every reason.
    """

    attention_type = AttentionType.DECODER

    def __init__(self, num_heads: int, head_dim: int, *args: Any, chunk_size: int, **options: Any) -> None:
        check_sizes(chunk_size=chunk_size)
        super().__init__(num_heads, head_dim, *args, chunk_size=chunk_size, **options)


def attention_layer(
    attention_type: AttentionType | str, num_heads: int, head_dim: int, *args: Any, **options: Any
) -> PagedAttention:
    """The layer of a type.

    Args:
        attention_type: an `AttentionType`, or its value.
        num_heads, head_dim, args, options: of the layer's class.

    Raises:
        ArgumentError: there is no such type, or the class refuses an argument.
        BackendUnavailableError: no backend, or not the named one, can run it.
    """
    classes: dict[str, type[PagedAttention]] = {
        AttentionType.DECODER: PagedAttention,
        AttentionType.ENCODER: EncoderAttention,
        AttentionType.ENCODER_ONLY: EncoderOnlyAttention,
        AttentionType.ENCODER_DECODER: CrossAttention,
    }
    try:
        found = classes[AttentionType(attention_type)]
    except ValueError:
        known = ", ".join(kind.value for kind in AttentionType)
        raise ArgumentError("attention_type", f"one of {known}", repr(attention_type)) from None
    return found(num_heads, head_dim, *args, **options)
