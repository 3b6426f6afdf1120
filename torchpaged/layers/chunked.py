"""Attention within chunks of a fixed number of positions, over a paged cache."""

from typing import Any

from torchpaged.attention import PagedAttention
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.layers.attention_type import AttentionType


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
