"""Multi-head latent attention over a paged cache of latents."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchpaged.backends import Choice, attention_spec, select_backend
from torchpaged.backends.fit import check_rows, require_block_size
from torchpaged.cache.latent import LayerLatentCache
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.checks import (
    check_is_dtype,
    check_sizes,
    check_softmax,
    check_tensors,
    given,
    refuse_grad,
    switch,
)
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.check import check_mla_attention, check_write_latent
from torchpaged.metadata import AttentionMetadata


class MLAAttention(nn.Module):
    """Write this step's latents into the paged cache, then attend over it.

    The module owns the projection from latents to keys and values, and never runs it on the cache: its half
    for keys goes into the queries, its half for values into what comes out. The other projections, the norm
    of the latents and the rotary embedding are the caller's. Source: DeepSeek-AI, "DeepSeek-V2"
    (arXiv:2405.04434), section 2.1.

    Args:
        num_heads: query heads.
        qk_nope_head_dim, qk_rope_head_dim: columns of a query head without and with rotary embedding.
        v_head_dim: columns of an output head.
        kv_lora_rank: columns of a latent.
        scale: softmax scale; default ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``.
        causal: hide keys after the query.
        block_size: tokens per block, if that shall count in the choice of a backend.
        kv_dtype: the pool's dtype, for that choice: float8_e4m3fn has rows of bytes with scales of their own
            (`torchpaged.cache.LatentLayerSpec` makes them); default: the module's.
        backend: a name, or "auto". Chosen here and again when the module moves (``.to``); on the meta device
            none is, until the module's first forward elsewhere.
        device, dtype: of the projection.

    Attributes:
        kv_b_proj: ``nn.Linear`` without a bias, weight ``[num_heads * (qk_nope_head_dim + v_head_dim),
            kv_lora_rank]``: for each head the keys' rows, then the values'.
        choice: the `Choice`: which backend runs and why; None on the meta device.

    Raises:
        ArgumentError: a size that is no positive int, or a scale that is not positive and finite.
        BackendUnavailableError: the named backend can't run this attention; the message has every reason.
    """

    choice: Choice | None
    _ops: BackendOps

    def __init__(
        self,
        num_heads: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        kv_lora_rank: int,
        scale: float | None = None,
        *,
        causal: bool = True,
        block_size: int | None = None,
        kv_dtype: torch.dtype | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(
            num_heads=num_heads,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            kv_lora_rank=kv_lora_rank,
            **given(block_size=block_size),
        )
        check_is_dtype(**given(dtype=dtype, kv_dtype=kv_dtype))
        if scale is not None:
            check_softmax(scale)
        switch("causal", causal)
        self.num_heads, self.kv_lora_rank, self.v_head_dim = num_heads, kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 if scale is None else float(scale)
        self.causal, self.block_size, self.kv_dtype = causal, block_size, kv_dtype
        self.requested_backend = backend
        rows = num_heads * (qk_nope_head_dim + v_head_dim)
        self.kv_b_proj = nn.Linear(kv_lora_rank, rows, bias=False, device=device, dtype=dtype)
        self._choose()

    def _choose(self) -> None:
        weight = self.kv_b_proj.weight
        self._chosen_for = weight.device, weight.dtype
        self.choice = None
        if weight.is_meta:
            return
        spec = attention_spec(
            device=weight.device,
            dtype=weight.dtype,
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.kv_lora_rank + self.qk_rope_head_dim,
            head_dim_v=self.kv_lora_rank,
            block_size=self.block_size,
            kv_dtype=self.kv_dtype,
            causal=self.causal,
            scale=self.scale,
            latent=True,
        )
        self.choice = select_backend(spec, self.requested_backend)
        self._ops = self.choice.backend.ops

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "MLAAttention":
        super()._apply(fn, recurse)
        self._choose()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: op handles can't be pickled; a copy chooses anew."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_ops", "choice")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        super().__setstate__(state)
        self._choose()

    def forward(
        self,
        query: Tensor,
        kv_c: Tensor | None,
        k_pe: Tensor | None,
        kv_cache: LayerLatentCache | Tensor,
        metadata: AttentionMetadata,
        *,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[..., num_heads, qk_nope_head_dim + qk_rope_head_dim]``, rotated; the leading dimensions
                flatten to ``num_tokens``.
            kv_c: ``[..., kv_lora_rank]``, normalised latents, or None to write nothing.
            k_pe: ``[..., qk_rope_head_dim]``, rotated keys of all heads, or None together with ``kv_c``.
            kv_cache: the layer's pool, ``[num_blocks, block_size, 1, kv_lora_rank + qk_rope_head_dim]``, or
                of float8_e4m3fn as `LayerLatentCache` says.
            metadata: the batch; its slots are those of the query tokens.
            indices: ``[num_tokens, top_k]`` int32, the positions in its request that each query token attends
                to (sparse attention); negative ones, and those it does not see, are none. None: all.

        Returns:
            ``[..., num_heads, v_head_dim]`` in query's dtype.

        Raises:
            ArgumentError: shapes, dtypes, devices or values don't fit; nothing is written then.
        """
        pool = kv_cache.kv_cache if isinstance(kv_cache, LayerLatentCache) else kv_cache
        if (kv_c is None) != (k_pe is None):
            raise ArgumentError(
                "kv_c, k_pe", "both or neither", f"kv_c {'None' if kv_c is None else 'given'}"
            )
        if not isinstance(pool, Tensor):
            raise ArgumentError(
                "kv_cache",
                "one layer's pool, a LayerLatentCache or its tensor",
                type(pool).__name__,
                "pass cache[layer] of a PagedKVCache",
            )
        weight, width = self.kv_b_proj.weight, self.qk_nope_head_dim + self.qk_rope_head_dim
        check_tensors(query=query, **given(indices=indices))
        # the projection's half for keys would get no gradient
        refuse_grad(query=query, kv_c=kv_c, k_pe=k_pe, **{"kv_b_proj.weight": weight})
        eager = not torch.compiler.is_compiling()
        if eager and (weight.device, weight.dtype) != self._chosen_for:
            self._choose()  # loaders replace tensors one by one
        check_rows("query", query, self.num_heads, width)
        require_block_size(pool, metadata, self.block_size)
        for feature in metadata.features:
            raise ArgumentError(
                "metadata", f"no {feature}: mla_attention takes none", f"one with a {feature}"
            )
        absorbed, up_values = self._absorbed(query.reshape(-1, self.num_heads, width), weight)
        out = absorbed.new_empty(absorbed.shape[0], self.num_heads, self.kv_lora_rank)
        batch = (metadata.block_table, metadata.seq_lens, metadata.query_start_loc)
        attend = (absorbed, pool, *batch, out)
        options: dict[str, Any] = {
            "max_query_len": metadata.max_query_len,
            "scale": self.scale,
            "causal": self.causal,
            "indices": indices,
        }
        write = self._to_write(kv_c, k_pe, pool, metadata)
        if eager:  # both calls are checked before the first one writes
            if write is not None:
                check_write_latent(*write)
            check_mla_attention(LatentCall.of(*attend, **options))
        if write is not None:
            self._ops.write_latent(*write)
        self._ops.mla_attention(*attend, **options)
        values = torch.einsum("thr,hvr->thv", out, up_values)
        return values.view(*query.shape[:-1], self.v_head_dim)

    if TYPE_CHECKING:
        __call__ = forward

    def _absorbed(self, q: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Queries ``[T, num_heads, kv_lora_rank + qk_rope_head_dim]`` over latents, and the projection's half
        for values."""
        up_keys, up_values = weight.view(self.num_heads, -1, self.kv_lora_rank).split(
            [self.qk_nope_head_dim, self.v_head_dim], dim=1
        )
        nope, rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        return torch.cat((torch.einsum("thn,hnr->thr", nope, up_keys), rope), dim=-1), up_values

    def _to_write(
        self, kv_c: Tensor | None, k_pe: Tensor | None, pool: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """The arguments of ``write_latent``."""
        if kv_c is None or k_pe is None:
            return None
        check_tensors(kv_c=kv_c, k_pe=k_pe)
        check_rows("kv_c", kv_c, self.kv_lora_rank)
        check_rows("k_pe", k_pe, self.qk_rope_head_dim)
        latents = kv_c.reshape(-1, self.kv_lora_rank), k_pe.reshape(-1, self.qk_rope_head_dim)
        return *latents, pool, metadata.slots_of("latents", "kv_c=None, k_pe=None")

    def extra_repr(self) -> str:
        """Sizes and the backend."""
        backend = "none yet" if self.choice is None else self.choice.name
        return (
            f"num_heads={self.num_heads}, qk_nope_head_dim={self.qk_nope_head_dim}, "
            f"qk_rope_head_dim={self.qk_rope_head_dim}, v_head_dim={self.v_head_dim}, "
            f"kv_lora_rank={self.kv_lora_rank}, backend={backend}"
        )
