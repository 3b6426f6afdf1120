"""Attention of an encoder over packed rows: every token sees all tokens of its row, or those within a window;
there is no cache and no padding, keys and values are read where they lie. And attention of a decoder to its
encoder's tokens, over a paged cache that is written once."""

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchpaged.attention import PagedAttention
from torchpaged.backends.features import BY_POSITION
from torchpaged.backends.fit import check_rows
from torchpaged.cache import LayerKVCache
from torchpaged.custom_ops.checks import check_dims, check_tensors
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.metadata import AttentionMetadata
from torchpaged.metadata.encoder import CrossMetadata


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


class CrossAttention(PagedAttention):
    """Every query sees all tokens of its row's encoder.

    Args:
        num_heads, head_dim, num_kv_heads, scale: as for `PagedAttention`.
        options: its ``logits_soft_cap``, ``sinks``, ``head_dim_v``, ``block_size``, ``kv_dtype``,
            ``backend``, ``limits``, ``session``, ``device``, ``dtype``.

    Raises:
        ArgumentError: sizes that don't fit together, or an option that depends on how far apart a query
            and a key are: they stand in different sequences.
        BackendUnavailableError: the named backend can't run this attention; the message has every reason.
    """

    attention_type = AttentionType.ENCODER_DECODER
    _writes_query_tokens = False

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        **options: Any,
    ) -> None:
        for name in BY_POSITION:
            if name in options:
                raise ArgumentError(
                    name,
                    "nothing: queries and keys of cross attention stand in different sequences",
                    repr(options[name]),
                )
        super().__init__(num_heads, head_dim, num_kv_heads, scale, causal=False, **options)

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: LayerKVCache | tuple[Tensor, ...],
        metadata: CrossMetadata,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Write the encoder's keys and values, if they are given, then attend to what the cache holds.

        Args:
            query: ``[..., num_heads, head_dim]``; the leading dimensions flatten to the packed queries.
            key: ``[..., num_kv_heads, head_dim]``, packed tokens of the encoder, or None: they were written
                before.
            value: ``[..., num_kv_heads, head_dim_v]``, or None together with ``key``.
            kv_cache: the layer's pools of the encoder's tokens.
            metadata: of `CacheRequests.cross`; with ``written`` where ``key`` is given.
            out: as for `PagedAttention`.

        Returns:
            ``[..., num_heads, head_dim_v]`` in query's dtype.

        Raises:
            ArgumentError: shapes, dtypes, devices or values don't fit, or keys without slots to write them
                to; nothing is written then.
        """
        if not isinstance(metadata, CrossMetadata):
            raise ArgumentError(
                "metadata", "CrossMetadata", type(metadata).__name__, "build it with rows.cross(query_lens)"
            )
        if key is not None and metadata.written is None:
            raise ArgumentError(
                "metadata",
                "where the encoder's tokens go, since keys are given",
                "written=None",
                "build it with rows.cross(query_lens, written=rows.append(encoder_lens))",
            )
        if key is None and metadata.written is not None:
            raise ArgumentError(
                "key",
                "the encoder's keys, since the metadata says that they are written",
                "None",
                "give keys, or build the metadata without written",
            )
        return super().forward(query, key, value, kv_cache, metadata.attention, out=out)

    if TYPE_CHECKING:
        __call__ = forward  # type: ignore[assignment]
