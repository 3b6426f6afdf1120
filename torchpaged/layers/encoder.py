"""Attention of an encoder over packed rows: every token sees all tokens of its row, or those within a window.
There is no cache and no padding; keys and values are read where they lie."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchpaged.attention import PagedAttention
from torchpaged.backends.fit import check_rows
from torchpaged.custom_ops.checks import check_dims, check_tensors
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.layers.attention_type import AttentionType
from torchpaged.metadata import AttentionMetadata


class EncoderOnlyAttention(PagedAttention):
    """Attention within packed rows, without a cache.

    Args:
        num_heads, head_dim, num_kv_heads, scale: as for `PagedAttention`.
        options: its ``window_size`` (of both sides), ``logits_soft_cap``, ``sinks``, ``head_dim_v``,
            ``causal`` (False here unless it is said), ``chunk_size``, ``backend``, ``limits``, ``session``,
            ``device``, ``dtype``.

    Raises:
        ArgumentError: sizes that don't fit together, or an option of caches.
        BackendUnavailableError: the named backend can't run this attention; the message has every reason.
    """

    attention_type = AttentionType.ENCODER_ONLY

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        **options: Any,
    ) -> None:
        for name in ("block_size", "kv_dtype"):
            if options.get(name) is not None:
                raise ArgumentError(name, "nothing: an encoder caches nothing", repr(options[name]))
        options["block_size"] = 1  # packed tokens are blocks of one
        super().__init__(num_heads, head_dim, num_kv_heads, scale, **{"causal": False, **options})

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[..., num_heads, head_dim]``; the leading dimensions flatten to the packed tokens of all
                rows.
            key: ``[..., num_kv_heads, head_dim]``, of the same tokens.
            value: ``[..., num_kv_heads, head_dim_v]``.
            metadata: of `encoder_metadata`.
            out: as for `PagedAttention`.

        Returns:
            ``[..., num_heads, head_dim_v]`` in query's dtype.

        Raises:
            ArgumentError: shapes, dtypes, devices or lengths don't fit.
        """
        check_tensors(query=query, key=key, value=value)
        check_rows("key", key, self.num_kv_heads, self.head_dim)
        check_rows("value", value, self.num_kv_heads, self.head_dim_v)
        k = key.reshape(-1, 1, self.num_kv_heads, self.head_dim)
        v = value.reshape(-1, 1, self.num_kv_heads, self.head_dim_v)
        if not torch.compiler.is_compiling():
            num_tokens = query.numel() // (self.num_heads * self.head_dim)
            check_dims("key", k, num_tokens, 1, self.num_kv_heads, self.head_dim)
            check_dims("value", v, num_tokens, 1, self.num_kv_heads, self.head_dim_v)
        return super().forward(query, None, None, (k, v), metadata, out=out)

    if TYPE_CHECKING:
        __call__ = forward  # type: ignore[assignment]


class EncoderAttention(EncoderOnlyAttention):
    """`EncoderOnlyAttention` of an encoder that stands before a decoder."""

    attention_type = AttentionType.ENCODER
