"""An attention backend for vLLM on the kernels of torchpaged. Experimental.

    vllm serve MODEL --attention-backend CUSTOM         # where torchpaged is installed, too

Written against vLLM's public interface ``vllm.v1.attention.backend``, and tested with a stand-in of it; it
has not run under a real vLLM yet. `TorchpagedAttentionBackend` says what it can't do in
`validate_configuration`, by the reasons that torchpaged's selector gives; what vLLM asks later than that
raises.

Decoder attention with a paged cache: windows, soft cap, ALiBi, sinks, fp8 caches with scales per tensor, any
mixture of prefills and decodes, full CUDA graphs. No MLA, no encoder attention, no context parallelism.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    MultipleOf,
)

from torchpaged.backends import attention_spec
from torchpaged.compat.reshape_and_cache import FP8_NAMES
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.vllm.layer import KV_CACHE_DTYPES, TorchpagedAttentionImpl, TorchpagedMetadata, choose_backend

#: What newer vLLM may say of a batch that changes which keys a query sees.
_UNKNOWN = ("mm_req_doc_ranges", "rswa_prefix_lens", "dcp_local_seq_lens", "encoder_seq_lens")


class TorchpagedMetadataBuilder(AttentionMetadataBuilder):
    """Takes vLLM's tensors as they are: the kernels read lengths and tables on the device, nothing is
    planned."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # abstract in vLLM

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TorchpagedMetadata:
        """The batch of a step.

        Raises:
            NotImplementedError: causality that differs between requests, or tokens that see more than
                causality and windows say.
        """
        common = common_attn_metadata
        for name in _UNKNOWN:
            if getattr(common, name, None) is not None:
                raise NotImplementedError(f"torchpaged: a batch with {name} is not supported")
        causal = getattr(common, "causal", True)
        if not isinstance(causal, bool):
            raise NotImplementedError("torchpaged: causality of each request its own is not supported")
        return TorchpagedMetadata(
            common.num_actual_tokens,
            max(common.max_query_len, 1),
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            causal,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> TorchpagedMetadata:
        """The batch of a capture: of one key each, since the launches are those of any lengths, and long ones
        only make the capture slow."""
        metadata = self.build(0, common_attn_metadata)
        metadata.seq_lens.fill_(1)
        return metadata

    def update_block_table(
        self, metadata: TorchpagedMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> TorchpagedMetadata:
        """The same batch over another group's blocks."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class TorchpagedAttentionBackend(AttentionBackend):
    """What vLLM's selector asks."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = KV_CACHE_DTYPES

    @staticmethod
    def get_name() -> str:
        """vLLM looks the backend up by it: the name of its registry's place for those of others."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TorchpagedAttentionImpl]:
        """The layer's part."""
        return TorchpagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TorchpagedMetadataBuilder]:
        """The batch's part."""
        return TorchpagedMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Keys and values of a block side by side."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any size runs; the fast prefill takes multiples of 8, and vLLM's own sizes are multiples of 16.
        Newer vLLM asks with the spec of a group of layers."""
        return [MultipleOf(16)]

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Newer vLLM asks."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks are one more logit per head."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """For a whole batch at once."""
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        *args: Any,
        **kwargs: Any,
    ) -> str | None:
        """Why no backend of torchpaged runs this, in its selector's words; None if one does."""
        if use_mla:
            return None  # vLLM says so itself
        try:
            choose_backend(
                attention_spec(
                    device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),  # vLLM does not say
                    dtype=dtype,
                    num_heads=8,
                    num_kv_heads=1,
                    head_dim=head_size,
                    block_size=block_size,
                    kv_dtype=FP8_NAMES.get(kv_cache_dtype or ""),
                    sinks=has_sink,
                )
            )
        except BackendUnavailableError as error:
            return f"torchpaged: {error}"
        return None
