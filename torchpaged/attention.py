"""PagedAttention: the drop-in layer for a model of your own.

    attention = PagedAttention(num_heads=32, head_dim=128, num_kv_heads=8)
    out = attention(query, key, value, kv_cache[layer], metadata)

It needs no engine and no global context: the layer's pools and the batch's metadata are arguments. What its
backend keeps between calls is in the layer's session, or in one that several layers share::

    session = torchpaged.open_session(attention_spec(...), Limits(max_num_reqs=64))
    layers = [PagedAttention(32, 128, 8, session=session) for _ in range(4)]
    # before each step, outside compiled code; a backend that needs no plan does nothing
    session.plan(metadata)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchpaged.backend_module import BackendModule
from torchpaged.backends import Limits, Route, Session
from torchpaged.backends.fit import check_out, check_rows, require_dtype, require_fit
from torchpaged.backends.spec import MaskMod, ScoreMod, check_mods
from torchpaged.cache import LayerKVCache
from torchpaged.cache.kv import layer_pools
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.check import check_block_sparse, check_options, check_paged_attention
from torchpaged.custom_ops.attention.mask import BlockSparse
from torchpaged.custom_ops.cache_write.call import WriteCall
from torchpaged.custom_ops.cache_write.check import check_write_kv
from torchpaged.custom_ops.checks import (
    check_is_dtype,
    check_sizes,
    check_tensors,
    given,
    refuse_grad,
    switch,
)
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.registry import check_native_dtype, checks_arguments
from torchpaged.metadata import AttentionMetadata
from torchpaged.prefixes.attention import attend_with_prefixes


class PagedAttention(BackendModule):
    """Write this step's keys and values into the paged cache, then attend over it.

    >>> cache = PagedKVCache.uniform(1, 2, 64, num_blocks=8, dtype=torch.float32)
    >>> attention = PagedAttention(num_heads=8, head_dim=64, num_kv_heads=2)
    >>> batch = cache.allocate(1).append([5])
    >>> key = value = torch.randn(5, 2, 64)
    >>> with torch.inference_mode():
    ...     attention(torch.randn(5, 8, 64), key, value, cache[0], batch).shape
    torch.Size([5, 8, 64])

    Args:
        num_heads: query heads.
        head_dim: width of queries and keys.
        num_kv_heads: key/value heads; default ``num_heads``. Must divide ``num_heads``.
        scale: softmax scale; default ``head_dim ** -0.5``.
        window_size: ``(left, right)`` keys visible besides the own one; -1 = open.
        logits_soft_cap: scores become ``cap * tanh(score / cap)``; None or 0 = off.
        alibi_slopes: ``[num_heads]`` numbers; a buffer of the module. The score of a key gets slope * (key
            position - query position), which is no penalty for keys behind the query.
        sinks: ``[num_heads]`` logits; a buffer of the module, in its dtype.
        head_dim_v: width of values; default ``head_dim``.
        causal: hide keys after the query.
        chunk_size: attend within chunks of that many positions only; None or 0 = off.
        score_mod: a function ``(score, request, head, query_position, key_position) -> score`` of tensors
            without dimensions, positions of the sequence, behind scale, soft cap and ALiBi. It is traced
            once: tensors that it reads may change in place, Python values are kept. Backend "flex" runs it.
        mask_mod: ``(request, head, query_position, key_position) -> bool``, which hides keys besides those
            that causality, window, chunks and lengths hide; likewise.
        batch_invariant: give a request the same bits in every batch; a backend that does
            not declare that is refused.
        block_size: tokens per block, if that shall count in the choice of a backend; a cache of another size
            is refused then. None: the cache says it.
        kv_dtype: the pools' dtype, for choosing a backend; default: the module's. Pools that the backend
            can't take are refused.
        tree_mask: whether batches with a ``tree_mask`` will come, so that it counts in the choice of a
            backend. Batches with one are refused where the backend takes none.
        block_sparse: blocks of keys that a query sees besides those near it (vertical and slash), as
            `BlockSparse` says; None = all. Needs ``causal``.
        output_scale: one positive number; results are then of float8_e4m3fn, attention over this scale,
            rounded and saturated. A float32 buffer of the module.
        backend: a name, a `Route` or its text ("decode=NAME,prefill=NAME"), or "auto". Chosen here and again
            when the module moves (``.to``), never in ``forward``.
        limits: the largest batches to come, for a session of the module's own. None: not said; a backend may
            refuse that. Eager calls of one module may overlap on different streams; compiled or captured
            ones, which take the session as it is, must not.
        session: an open one that several modules share, in place of ``backend`` and ``limits``; their calls
            must not overlap on different streams.
        device, dtype: as for any module; default torch's. On the meta device no backend is chosen, until the
            module gets a real one: by ``to_empty``, or, where loaders assign its tensors one by one, at its
            first eager forward. ``alibi_slopes`` and ``sinks`` that were given as numbers are filled in then.

    Attributes:
        choice: the `Choice`: which backend runs and why; named "meta" where there is none yet.
        spec: what the module asks of it.
        session: what that backend keeps open for it.

    Raises:
        ArgumentError: sizes that don't fit together.
        BackendUnavailableError: the named backend can't run this attention; the message has every reason.
    """

    _asked = (
        *("num_heads", "num_kv_heads", "head_dim", "head_dim_v", "block_size", "kv_dtype", "causal", "scale"),
        *("window_size", "logits_soft_cap", "alibi_slopes", "sinks", "chunk_size", "tree_mask"),
        *("output_scale", "block_sparse", "score_mod", "mask_mod", "batch_invariant"),
    )
    _writes_query_tokens = True  # not in cross attention, where they are the encoder's

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        logits_soft_cap: float | None = None,
        alibi_slopes: Sequence[float] | Tensor | None = None,
        sinks: Sequence[float] | Tensor | None = None,
        *,
        head_dim_v: int | None = None,
        causal: bool = True,
        chunk_size: int | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        batch_invariant: bool = False,
        block_size: int | None = None,
        kv_dtype: torch.dtype | None = None,
        tree_mask: bool = False,
        block_sparse: BlockSparse | None = None,
        output_scale: float | Tensor | None = None,
        backend: str | Route = "auto",
        limits: Limits | None = None,
        session: Session | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads, head_dim=head_dim)
        check_sizes(**given(num_kv_heads=num_kv_heads, head_dim_v=head_dim_v, block_size=block_size))
        check_is_dtype(**given(dtype=dtype, kv_dtype=kv_dtype))
        window_size = check_options(scale, window_size, logits_soft_cap, chunk_size)
        switches = {"causal": causal, "batch_invariant": batch_invariant, "tree_mask": tree_mask}
        for name, value in switches.items():
            switch(name, value)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % self.num_kv_heads:
            raise ArgumentError("num_kv_heads", f"a divisor of num_heads ({num_heads})", str(num_kv_heads))
        self.head_dim_v = head_dim if head_dim_v is None else head_dim_v
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window_size, self.logits_soft_cap, self.chunk_size = window_size, logits_soft_cap, chunk_size
        check_mods(score_mod, mask_mod)
        check_block_sparse(block_sparse, causal, tree_mask)
        self.block_sparse = block_sparse
        self.score_mod, self.mask_mod, self.batch_invariant = score_mod, mask_mod, batch_invariant
        self.causal, self.tree_mask, self.block_size, self.kv_dtype = causal, tree_mask, block_size, kv_dtype
        one = [output_scale] if isinstance(output_scale, (int, float)) else output_scale
        self._place(
            {"sinks": sinks, "alibi_slopes": alibi_slopes, "output_scale": one},
            backend,
            limits,
            session,
            device,
            dtype,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: LayerKVCache | tuple[Tensor, ...],
        metadata: AttentionMetadata,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[..., num_heads, head_dim]``; the leading dimensions flatten to ``num_tokens``.
            key: ``[..., num_kv_heads, head_dim]``, or None to write nothing (a layer that shares another
                one's cache).
            value: ``[..., num_kv_heads, head_dim_v]``, or None together with ``key``.
            kv_cache: the layer's pools: a `LayerKVCache`, ``(k_cache, v_cache)``, or for fp8
                ``(k_cache, v_cache, k_scale, v_scale)``.
            metadata: the batch; its slots are those of the query tokens. Requests may share a prefix that is
                computed in this same step, but not in a step of one query token each: there the GPU kernels
                read what lies before the query tokens while ``key`` and ``value`` are still written.
            out: ``[..., num_heads, head_dim_v]`` in the result's dtype to write into, which is returned:
                apart from the other tensors, and its leading dimensions flatten without a copy. None: a new
                one.

        Returns:
            ``[..., num_heads, head_dim_v]`` in query's dtype, of float8_e4m3fn with an ``output_scale``.

        Raises:
            ArgumentError: shapes, dtypes, devices or values don't fit, the cache's block size is not the
                metadata's, or the batch is over the session's limits; nothing is written then.
            BackendUnavailableError: the backend can't take pools of this dtype or block size, or no batch
                with a ``tree_mask``.
            PlanError: the backend plans every batch, and ``session.plan(metadata)`` was not called.
        """
        pools = layer_pools(kv_cache)
        if (key is None) != (value is None):
            raise ArgumentError("key, value", "both or neither", f"key {'None' if key is None else 'given'}")
        if self._on_meta and query.device.type != "meta":
            self._settle(query)
        check_tensors(query=query, k_cache=pools.k_cache, v_cache=pools.v_cache)
        check_rows("query", query, self.num_heads, self.head_dim)
        require_fit(pools.k_cache, metadata, self.session, self.block_size)
        write = self._to_write(key, value, pools, metadata)
        q = query.reshape(-1, self.num_heads, self.head_dim)
        options = self._options()
        result = out
        if result is None:
            dtype = q.dtype if options["output_scale"] is None else torch.float8_e4m3fn
            result = q.new_empty(*query.shape[:-1], self.head_dim_v, dtype=dtype)
        eager = not torch.compiler.is_compiling()
        if out is not None and eager:
            check_out(out, query, self.head_dim_v, key, value)
        call = AttentionCall.over(
            metadata,
            q,
            pools.k_cache,
            pools.v_cache,
            result.view(-1, self.num_heads, self.head_dim_v),
            **pools.scales.by_name,
            **options,
        )
        of_heads = {name: options[name] for name in ("sinks", "alibi_slopes", "output_scale")}
        refuse_grad(query=query, key=key, value=value, **of_heads)
        workspace = self._checked(call, write, metadata) if eager else self._workspace
        require_dtype(query, self.session)
        prefixes = metadata.prefixes
        if prefixes is not None and (metadata.features or not self._reads_once):
            prefixes = None
        if write is not None:
            # longer queries may be another request's context, see above; they gain little from the
            # early start
            keys_of_queries = self._writes_query_tokens and metadata.max_query_len == 1
            self._ops.write_kv(*write, are_query_tokens=keys_of_queries and prefixes is None)
        if prefixes is not None:
            attend_with_prefixes(self._ops, call._replace(semaphore=workspace.get("semaphore")), prefixes)
        else:
            tensors, options = call.flat()
            self._ops.paged_attention(*tensors, **options, **workspace)
        return result

    if TYPE_CHECKING:
        __call__ = forward  # what type checkers know a call by

    def _checked(
        self, call: AttentionCall, write: tuple[Any, ...] | None, metadata: AttentionMetadata
    ) -> dict[str, Tensor]:
        """The workspace of an eager step whose calls are right: each checked once, here or by its op, and
        both before the first one writes."""
        attend, device = self._ops.paged_attention, call.q.device
        if write is not None and not checks_arguments(self._ops.write_kv, device):
            check_write_kv(WriteCall.of(*write))
        if write is not None or not checks_arguments(attend, device):
            check_paged_attention(call)
        self.session.require(metadata, call.q.shape[0])
        check_native_dtype(attend, query=call.q)
        if call.k_cache.dtype != call.q.dtype:
            check_native_dtype(attend, k_cache=call.k_cache)
        return self.session.workspace_for(self._workspace, metadata.num_reqs)

    def _to_write(
        self, key: Tensor | None, value: Tensor | None, pools: LayerKVCache, metadata: AttentionMetadata
    ) -> tuple[Any, ...] | None:
        """The arguments of ``write_kv``."""
        if key is None or value is None:
            return None
        check_tensors(key=key, value=value)
        check_rows("key", key, self.num_kv_heads, self.head_dim)
        check_rows("value", value, self.num_kv_heads, self.head_dim_v)
        k = key.reshape(-1, self.num_kv_heads, self.head_dim)
        v = value.reshape(-1, self.num_kv_heads, self.head_dim_v)
        slots = metadata.slots_of("keys", "key=None, value=None")
        return k, v, pools.k_cache, pools.v_cache, slots, *pools.scales

    def _options(self) -> dict[str, Any]:
        """The options of the module's own, as the record of a call has them."""
        return {
            "scale": self.scale,
            "causal": self.causal,
            "window_left": self.window_size[0],
            "window_right": self.window_size[1],
            "logits_soft_cap": self.logits_soft_cap or 0.0,
            "alibi_slopes": self._of_heads("alibi_slopes"),
            "sinks": self._of_heads("sinks"),
            "chunk_size": self.chunk_size or 0,
            "block_sparse": self.block_sparse,
            "output_scale": self._of_heads("output_scale"),
        }

    def _of_heads(self, name: str) -> Tensor | None:
        """A buffer, or the parameter that was put in its place. A module's own look for a buffer takes
        longer."""
        found: Tensor | None = self._buffers[name] if name in self._buffers else getattr(self, name)
        return found

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, num_kv_heads={self.num_kv_heads}, "
            f"scale={self.scale:.4g}, backend={self.choice.name!r}"
        )
