"""A call of an attention op as one record: made once where torch's flat arguments end (registry.py), and
handed to the check, the fake, the reference and every launcher.

A new option is a field here and an argument of schema.py; code that uses it reads it from the record.
Shapes, dtypes and meanings: schema.py. ``T`` tokens, ``B`` requests, ``G`` groups.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.mask import BlockSparse, Mask
from torchpaged.custom_ops.pools import FP8, KVScales


class AttentionCall(NamedTuple):
    """The arguments of ``paged_attention``, tensors and options, with the schema's defaults.

    A NamedTuple and no frozen dataclass: it is made in a third of the time, and traces.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    out: Tensor
    lse: Tensor | None
    max_query_len: int
    scale: float
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    logits_soft_cap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    scales: KVScales = KVScales()
    chunk_size: int = 0
    tree_mask: Tensor | None = None
    output_scale: Tensor | None = None
    block_sparse: BlockSparse | None = None
    semaphore: Tensor | None = None

    @classmethod
    def of(cls, *tensors: Any, **options: Any) -> Self:
        """The call of flat arguments, as torch's dispatcher gives them: it leaves out trailing defaults."""
        if len(tensors) < _POSITIONAL:
            tensors = (*tensors, options.pop("lse", None))
        if "block_sparse" in options:
            options["block_sparse"] = BlockSparse.of(options["block_sparse"])
        options["scales"] = KVScales.taken(options)
        return cls(*tensors, **options)

    @classmethod
    def over(
        cls,
        batch: Any,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        **options: Any,
    ) -> Self:
        """The call of one layer: block table, lengths, query starts and tree mask are those of ``batch``,
        such as `torchpaged.AttentionMetadata`; ``options``: as the op has them."""
        options["tree_mask"], longest = batch.tree_mask, batch.max_query_len
        table, starts, options["scales"] = batch.block_table, batch.query_start_loc, KVScales.taken(options)
        return cls(q, k_cache, v_cache, table, batch.seq_lens, starts, out, lse, longest, **options)

    def flat(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments and keywords for an op's handle, without those that are their defaults: an op
        of another library need not know them, and each costs time in the dispatcher."""
        options: dict[str, Any] = {"max_query_len": self.max_query_len, "scale": self.scale}
        for name, value, default in zip(_NAMES, self[-len(_NAMES) :], _DEFAULTS, strict=True):
            if value is not default:
                options[name] = value
        scales: KVScales = options.pop("scales", _NO_SCALES)
        return self[:_POSITIONAL], options | scales.by_name

    @property
    def optional(self) -> tuple[Tensor | None, ...]:
        """The tensors that it may have, in the order in which kernels take them: of heads, of the pools, of
        tokens."""
        return self.alibi_slopes, self.sinks, *self.scales, self.tree_mask

    @property
    def mask(self) -> Mask:
        """What hides keys by their positions."""
        return Mask._make(getattr(self, name) for name in Mask._fields)

    @property
    def per_token(self) -> dict[str, Tensor]:
        """The tensors ``[T]`` int64 that it has, by name."""
        return {} if self.tree_mask is None else {"tree_mask": self.tree_mask}

    @property
    def num_reqs(self) -> int:
        """``B``."""
        return self.block_table.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """Of the pools."""
        return self.k_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.q.shape[1] // self.k_cache.shape[2]

    @property
    def dim_v(self) -> int:
        """Width of a value."""
        return self.v_cache.shape[3]

    @property
    def capacity(self) -> int:
        """Tokens that a row of the block table holds."""
        return self.block_table.shape[1] * self.k_cache.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of queries and results; where one of the two is fp8, of the other; bfloat16 where both are."""
        if self.output_scale is None:
            return self.out.dtype
        return torch.bfloat16 if self.fp8_queries else self.q.dtype

    @property
    def fp8_queries(self) -> bool:
        """Whether both products are of 8 bits."""
        return self.q.dtype in FP8

    def for_launch(self) -> Self:
        """The same call as the GPU kernels take it: masks that reach past the block table are open, since a
        position plus a huge window would overflow 32 bits; both scales or none, since one flag serves both;
        no tree mask where each query token is alone in its request, and sees itself whatever its word says;
        no mask of blocks whose slash reaches over all of them."""
        changed: dict[str, Any] = {}
        most = max(self.window_left, self.window_right, self.chunk_size)
        if most > 0 and most >= (capacity := self.capacity):
            changed = {
                name: -1 for name in ("window_left", "window_right") if getattr(self, name) >= capacity
            }
            if self.chunk_size >= capacity:
                changed["chunk_size"] = 0
        if 0 < len(self.scales.by_name) < len(self.scales):
            one = torch.ones(1, dtype=torch.float32, device=self.q.device)
            changed["scales"] = KVScales._make(one if scale is None else scale for scale in self.scales)
        if self.tree_mask is not None and self.max_query_len == 1:
            changed["tree_mask"] = None
        pattern = self.block_sparse
        if pattern is not None and pattern.local_blocks * pattern.block_size >= self.capacity:
            changed["block_sparse"] = None
        return self._replace(**changed) if changed else self

    def with_semaphore(self) -> Self:
        """The same call with zeros of its own where it brings no semaphore."""
        if self.semaphore is not None:
            return self
        count = self.num_reqs * self.num_kv_heads
        return self._replace(semaphore=torch.zeros(count, dtype=torch.int32, device=self.q.device))

    def empty(self) -> None:
        """What a call without requests gives: zeros and LSE -inf."""
        self.out.zero_()
        if self.lse is not None:
            self.lse.fill_(float("-inf"))


_NO_SCALES = KVScales()
_POSITIONAL = AttentionCall._fields.index("lse") + 1
_NAMES = tuple(AttentionCall._field_defaults)
_DEFAULTS = tuple(AttentionCall._field_defaults.values())


class Specialisation(NamedTuple):
    """What a kernel for `AttentionCall.for_launch` is compiled for, whatever its tiles: the cache key of a
    compiled kernel, together with what the kernel's own room adds.

    Attributes:
        dtype: `AttentionCall.dtype`; of results but for ``fp8_results``, of queries but for ``fp8_queries``.
        kv_dtype: of the pools.
        group: query heads of a kv head.
        k_strides, v_strides: of a block, a slot and a head, in numbers.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    fp8_queries: bool
    group: int
    num_kv_heads: int
    dim: int
    dim_v: int
    block_size: int
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    chunk_size: int = 0
    soft_cap: bool = False
    alibi: bool = False
    sinks: bool = False
    scales: bool = False
    lse: bool = False
    tree: bool = False
    fp8_results: bool = False
    block_sparse: BlockSparse | None = None

    @classmethod
    def of(cls, call: AttentionCall) -> Self:
        """That of a call."""
        _, block_size, num_kv_heads, dim = call.k_cache.shape
        return cls(
            call.dtype,
            call.k_cache.dtype,
            call.fp8_queries,
            call.q.shape[1] // num_kv_heads,
            num_kv_heads,
            dim,
            call.v_cache.shape[3],
            block_size,
            call.k_cache.stride()[:3],
            call.v_cache.stride()[:3],
            call.causal,
            call.window_left,
            call.window_right,
            call.chunk_size,
            call.logits_soft_cap > 0,
            call.alibi_slopes is not None,
            call.sinks is not None,
            bool(call.scales.by_name),
            call.lse is not None,
            call.tree_mask is not None,
            call.output_scale is not None,
            call.block_sparse,
        )

    def without_features(self) -> Self:
        """The same sizes and dtypes with a causal mask alone."""
        sizes: tuple[Any, ...] = self[: self._fields.index("causal")]
        return type(self)(*sizes)

    @property
    def low(self) -> bool:
        """Whether rows may not see the first keys."""
        return self.window_left >= 0 or self.chunk_size > 0

    @property
    def plain(self) -> bool:
        """Whether no mask at the low end and nothing but a scale changes a score."""
        return not (self.low or self.soft_cap or self.alibi)
