"""A stand-in of the parts of vLLM that a backend of others meets, written from the documented signatures of
``vllm.v1.attention.backend`` and ``vllm.v1.attention.backends.registry`` (0.15 to 0.33)."""

import enum
import importlib
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from signatures import takes
from torch import Tensor


class AttentionType(str, enum.Enum):  # noqa: UP042 - as it is there
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend(ABC):
    """Abstract methods must be there; the rest answers as vLLM's defaults do."""

    supported_dtypes: list[torch.dtype] = [torch.float16, torch.bfloat16]  # noqa: RUF012
    supported_kv_cache_dtypes: list[str] = ["auto"]  # noqa: RUF012
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]: ...

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_combination(cls, *args: Any, **kwargs: Any) -> str | None:
        return None

    @classmethod
    @takes(
        "self, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, "
        "device_capability, attn_type"
    )
    def validate_configuration(cls, given: Any) -> list[str]:
        reasons = []
        if given.dtype not in cls.supported_dtypes:
            reasons.append("dtype not supported")
        if given.kv_cache_dtype not in (None, *cls.supported_kv_cache_dtypes):
            reasons.append("kv_cache_dtype not supported")
        if given.use_mla and not cls.is_mla():
            reasons.append("MLA not supported")
        if given.has_sink and not cls.supports_sink():
            reasons.append("attention sinks not supported")
        if not cls.supports_attn_type(given.attn_type):
            reasons.append(f"attention type {given.attn_type} not supported")
        *asked, _ = vars(given).values()
        more = cls.supports_combination(*asked)
        return reasons + ([more] if more is not None else [])


class AttentionMetadataBuilder(ABC):
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False

    @abstractmethod
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return cls._cudagraph_support

    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any: ...

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        return self.build(0, common_attn_metadata, fast_build=True)


class AttentionImpl(ABC):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        self.dcp_world_size = self.pcp_world_size = self.total_cp_world_size = 1  # type: ignore[attr-defined]
        return self

    @abstractmethod
    def __init__(self, num_heads: int, head_size: int, scale: float) -> None: ...

    @abstractmethod
    def forward(self, layer: Any, query: Tensor, *args: Any) -> Tensor: ...


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True


@dataclass(frozen=True)
class QuantKey:
    """Of ``vllm.model_executor.layers.quantization.utils.quant_utils``; there the scale is a record."""

    dtype: torch.dtype
    scale: str


kFp8StaticTensorSym = QuantKey(torch.float8_e4m3fn, "static, one")
_QUANT_UTILS = "vllm.model_executor.layers.quantization.utils.quant_utils"
_OVERRIDES: dict[Any, str] = {}


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def get_path(self) -> str:
        path = _OVERRIDES.get(self, self.value)
        if not path:
            raise ValueError(f"Backend {self.name} must be registered before use.")
        return path

    def get_class(self) -> type:
        module, _, name = self.get_path().rpartition(".")
        return getattr(importlib.import_module(module), name)

    def is_overridden(self) -> bool:
        return self in _OVERRIDES


def register_backend(backend: Any, class_path: str | None = None, is_mamba: bool = False) -> Any:
    assert class_path is not None
    _OVERRIDES[backend] = class_path
    return lambda x: x


def modules() -> dict[str, types.ModuleType]:
    """For ``sys.modules``."""
    _OVERRIDES.clear()
    made = {name: types.ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.attention")}
    for name in ("backend", "backends", "backends.registry"):
        made[f"vllm.v1.attention.{name}"] = types.ModuleType(f"vllm.v1.attention.{name}")
    packages = _QUANT_UTILS.split(".")
    for count in range(2, len(packages) + 1):
        made[name] = types.ModuleType(name := ".".join(packages[:count]))
    made[_QUANT_UTILS].kFp8StaticTensorSym = kFp8StaticTensorSym  # type: ignore[attr-defined]
    interface = [
        AttentionType,
        MultipleOf,
        AttentionCGSupport,
        AttentionBackend,
        AttentionMetadataBuilder,
        AttentionImpl,
    ]
    for thing in [*interface, CommonAttentionMetadata]:
        setattr(made["vllm.v1.attention.backend"], thing.__name__, thing)
    for thing in (AttentionBackendEnum, register_backend):
        setattr(made["vllm.v1.attention.backends.registry"], thing.__name__, thing)
    return made
