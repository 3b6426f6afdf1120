"""The layer's part of the vLLM backend: writes its keys and values, then attends. See
`torchpaged.vllm.backend`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from torchpaged.backends import AttentionSpec, Backend, Limits, Session, attention_spec, select_backend
from torchpaged.backends.capabilities import Planning
from torchpaged.backends.choose.kind import Kind
from torchpaged.compat.reshape_and_cache import FP8_NAMES
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.custom_ops.pools import KVScales

#: vLLM's names of cache dtypes that are served.
KV_CACHE_DTYPES = ["auto", "float16", "bfloat16", *FP8_NAMES]


@dataclass
class TorchpagedMetadata:
    """One batch, as vLLM hands it out; every layer of a group shares it.

    Attributes:
        num_actual_tokens: host int, tokens of the batch, padding of a graph included.
        max_query_len: host int, an upper bound of the query lengths.
        query_start_loc: ``[num_reqs + 1]`` int32.
        seq_lens: ``[num_reqs]`` int32; 0 = padding row.
        block_table: ``[num_reqs, max_blocks_per_req]`` int32.
        slot_mapping: ``[num_actual_tokens]`` int64; -1 = padding.
        causal: hide keys after the query.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool = True


class TorchpagedAttentionImpl(AttentionImpl):
    """A layer's attention: writes its keys and values, then attends."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> None:
        given = [name for name, value in unknown.items() if value is not None]
        if given:
            raise NotImplementedError(f"torchpaged: arguments that it does not know: {', '.join(given)}")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"torchpaged: attention type {attn_type}; only decoder attention is done"
            )
        if getattr(self, "total_cp_world_size", 1) > 1:
            raise NotImplementedError("torchpaged: context parallelism is not done")
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise NotImplementedError(f"torchpaged: kv_cache_dtype {kv_cache_dtype}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.window_left = -1 if sliding_window is None else sliding_window - 1
        self.kv_cache_dtype, self.logits_soft_cap = kv_cache_dtype, logits_soft_cap or 0.0
        self.writes = kv_sharing_target_layer_name is None
        self.sinks = sinks
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")
        )
        self._sessions: dict[tuple[Any, ...], tuple[Session, dict[str, Tensor]]] = {}

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: TorchpagedMetadata | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend over the cache, into ``output``.

        Args:
            layer: has ``_k_scale`` and ``_v_scale``, float32 of one number, for fp8 caches.
            query: ``[num_tokens, num_heads, head_size]``, padding included.
            key, value: ``[num_tokens, num_kv_heads, head_size]``; not written where another layer's cache is
                shared.
            kv_cache: ``[num_blocks, 2, block_size, num_kv_heads, head_size]``, or newer vLLM's
                ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``; fp8 as such or as uint8.
            attn_metadata: the batch; None in a profiling run, which gives zeros.
            output: of query's shape, its heads flattened or not.
            output_scale: float32 of one number; ``output`` is then of float8_e4m3fn, attention over this
                scale.
            output_block_scale: refused.

        Returns:
            ``output``; rows of padding are zeros.

        Raises:
            NotImplementedError: no ``output``, scales for blocks of it, or a window or ALiBi that is not
                causal.
            BackendUnavailableError: no backend of torchpaged runs this attention here.
        """
        if output is None or output_block_scale is not None:
            raise NotImplementedError("torchpaged: it writes into output, with one scale at most")
        if attn_metadata is None:
            return output.zero_()
        if not attn_metadata.causal and (self.window_left >= 0 or self.alibi_slopes is not None):
            raise NotImplementedError("torchpaged: a window or ALiBi where keys after the query are seen")
        batch, (k_cache, v_cache) = attn_metadata, self._pools(kv_cache)
        refuse_grad(query=query, key=key, value=value)
        scales = KVScales()
        if self.kv_cache_dtype in FP8_NAMES:
            scales = KVScales(layer._k_scale.reshape(-1), layer._v_scale.reshape(-1))
        call = self._call(query, k_cache, v_cache, batch, output, scales)
        if output_scale is not None:
            call = call._replace(output_scale=output_scale.reshape(-1))
        session, workspace = self._session_of(call)
        if self.writes and key is not None and value is not None:
            slots = batch.slot_mapping[: batch.num_actual_tokens]
            k, v = (x.view(-1, self.num_kv_heads, self.head_size)[: slots.shape[0]] for x in (key, value))
            session.ops.write_kv(
                k, v, k_cache, v_cache, slots, *scales, are_query_tokens=batch.max_query_len == 1
            )
        tensors, options = call.flat()
        kept = session.workspace_for(workspace, call.num_reqs)
        session.ops.paged_attention(*tensors, **{**options, **kept})
        return output

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether vLLM's compiler may have this layer quantise what it writes: to float8_e4m3fn with one
        scale that is known ahead, where a backend of torchpaged does that."""
        from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

        if quant_key != kFp8StaticTensorSym or quant_key.dtype != torch.float8_e4m3fn:
            return False
        spec = attention_spec(
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),  # vLLM does not say
            dtype=torch.bfloat16,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            kv_dtype=FP8_NAMES.get(self.kv_cache_dtype),
            output_scale=True,
        )
        try:
            choose_backend(spec)
        except BackendUnavailableError:
            return False
        return True

    def _call(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: TorchpagedMetadata,
        output: Tensor,
        scales: KVScales,
    ) -> AttentionCall:
        num_tokens = batch.num_actual_tokens
        return AttentionCall(
            query.view(-1, self.num_heads, self.head_size)[:num_tokens],
            k_cache,
            v_cache,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            output.view(-1, self.num_heads, self.head_size)[:num_tokens],
            None,
            batch.max_query_len,
            self.scale,
            batch.causal,
            self.window_left,
            -1,
            self.logits_soft_cap,
            self._slopes(query.device),
            self.sinks,
            scales,
        )

    def _pools(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        if self.kv_cache_dtype in FP8_NAMES and kv_cache.dtype == torch.uint8:
            kv_cache = kv_cache.view(FP8_NAMES[self.kv_cache_dtype])
        if kv_cache.dim() == 5 and kv_cache.shape[1] == 2:
            k_cache, v_cache = kv_cache.unbind(1)
        elif kv_cache.dim() == 4 and kv_cache.shape[3] == 2 * self.head_size:
            k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        else:
            raise NotImplementedError(f"torchpaged: a KV cache of shape {list(kv_cache.shape)}")
        return k_cache, v_cache

    def _slopes(self, device: torch.device) -> Tensor | None:
        if self.alibi_slopes is not None and self.alibi_slopes.device != device:
            self.alibi_slopes = self.alibi_slopes.to(device)  # once: before any graph is captured
        return self.alibi_slopes

    def _session_of(self, call: AttentionCall) -> tuple[Session, dict[str, Tensor]]:
        """Opened once for a kind of call, before any capture: vLLM warms up first. Its op is opaque to its
        compiler, so that this runs in no trace."""
        q, pool = call.q, call.k_cache
        kind = (q.device, q.dtype, pool.dtype, pool.shape[1], call.causal, call.output_scale is None)
        if kind not in self._sessions:
            spec = Kind.of(call).spec()
            session = choose_backend(spec).open([spec], Limits(), q.device)
            self._sessions[kind] = session, session.workspace(spec)
        return self._sessions[kind]


def choose_backend(spec: AttentionSpec) -> Backend:
    """The backend that torchpaged's selector chooses for it.

    Raises:
        BackendUnavailableError: none can run it, or one that plans every batch was asked for, which vLLM's
            layers leave no place for.
    """
    chosen = select_backend(spec).backend
    if chosen.capabilities.planning != Planning.NEVER:
        raise BackendUnavailableError(
            f"backend {chosen.name!r} plans its batches, which vLLM's layers can't do"
        )
    return chosen
