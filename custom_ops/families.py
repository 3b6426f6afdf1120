"""The ops, family by family: schemas, records, fake kernels, and which kernels there are. registry.py
registers them; a family's folder has its ``schema.py`` and ``call.py``."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.cascade_call import CascadeCall, MergeCall
from torchpaged.custom_ops.attention.fake import FAKES as ATTENTION_FAKES
from torchpaged.custom_ops.attention.schema import SCHEMAS as ATTENTION
from torchpaged.custom_ops.block_ops.schema import SCHEMAS as BLOCK_OPS
from torchpaged.custom_ops.cache_write.call import RotatedWriteCall, WriteCall
from torchpaged.custom_ops.cache_write.fake import FAKES as CACHE_WRITE_FAKES
from torchpaged.custom_ops.cache_write.schema import SCHEMAS as CACHE_WRITE
from torchpaged.custom_ops.experts.call import ExpertsCall, RouteCall
from torchpaged.custom_ops.experts.schema import SCHEMAS as EXPERTS
from torchpaged.custom_ops.indexer.call import IndexCall
from torchpaged.custom_ops.indexer.schema import SCHEMAS as INDEXER
from torchpaged.custom_ops.layers.call import LinearCall, NormCall
from torchpaged.custom_ops.layers.schema import SCHEMAS as LAYERS
from torchpaged.custom_ops.mla.call import LatentCall, LatentWriteCall
from torchpaged.custom_ops.mla.fake import FAKES as MLA_FAKES
from torchpaged.custom_ops.mla.schema import SCHEMAS as MLA
from torchpaged.custom_ops.state.call import (
    ConvCall,
    DeltaStepCall,
    GatedNormCall,
    GatesCall,
    LinearAttentionCall,
    Mamba2StepCall,
)
from torchpaged.custom_ops.state.channels import RgLruCall, SelectiveScanCall
from torchpaged.custom_ops.state.schema import SCHEMAS as STATE
from torchpaged.custom_ops.step_end.call import AcceptCall, AdvanceCall, FinishCall, SampleCall
from torchpaged.custom_ops.step_end.schema import SCHEMAS as STEP_END


class Family(NamedTuple):
    """The ops of a folder. Each has a reference and a Triton kernel there.

    Attributes:
        folder: its name.
        schemas: op -> schema.
        records: op -> what makes its record out of its flat arguments. The Python functions behind these ops
            take the record alone, fakes included.
        fakes: op -> its fake kernel, of ops that a public function or module calls in users' compiled code:
            it refuses while they are traced what can't fit, so that no op ahead has written. All others'
            arguments are checked when they run.
        cuda: ops with a kernel in CUDA C++.
        native: ops with a native C++ kernel for CPUs.
        on_native: ops that the folder's ``cpu.py`` makes of native ones, or of torch's. On a CPU all others
            run their reference, as the default and as the ``.cpu`` overload.
    """

    folder: str
    schemas: Mapping[str, str]
    records: Mapping[str, Callable[..., Any]]
    fakes: Mapping[str, Callable[..., None]] = MappingProxyType({})
    cuda: tuple[str, ...] = ()
    native: tuple[str, ...] = ()
    on_native: tuple[str, ...] = ()


FAMILIES = (
    Family(
        "attention",
        ATTENTION,
        {
            "paged_attention": AttentionCall.of,
            "cascade_attention": CascadeCall.of,
            "merge_attn_states": MergeCall,
        },
        fakes=ATTENTION_FAKES,
        cuda=("paged_attention", "cascade_attention"),
        native=("paged_attention", "merge_attn_states"),
    ),
    Family(
        "cache_write",
        CACHE_WRITE,
        {"write_kv": WriteCall.of, "rope_write_kv": RotatedWriteCall.of},
        fakes=CACHE_WRITE_FAKES,
        native=("write_kv", "rope_write_kv"),
    ),
    Family("block_ops", BLOCK_OPS, {}, native=("copy_blocks",)),
    Family(
        "step_end",
        STEP_END,
        {
            "advance_step": AdvanceCall,
            "sample_tokens": SampleCall,
            "accept_tokens": AcceptCall,
            "finish_step": FinishCall.of,
        },
        native=("advance_step", "sample_tokens", "accept_tokens", "finish_step"),
    ),
    Family(
        "layers",
        LAYERS,
        {"rms_norm": NormCall, "linear": LinearCall},
        cuda=("linear",),
        native=("linear", "rms_norm", "embedding"),
    ),
    Family(
        "experts",
        EXPERTS,
        {"route_experts": RouteCall, "apply_experts": ExpertsCall},
        cuda=("apply_experts",),
        native=("apply_experts",),
    ),
    Family(
        "mla",
        MLA,
        {"mla_attention": LatentCall.of, "rope_write_latent": LatentWriteCall},
        fakes=MLA_FAKES,
        cuda=("mla_attention",),
        on_native=("mla_attention", "write_latent"),
    ),
    Family("indexer", INDEXER, {"index_logits": IndexCall}, cuda=("index_logits", "top_k_indices")),
    Family(
        "state",
        STATE,
        {
            "causal_conv": ConvCall,
            "linear_attention": LinearAttentionCall,
            "delta_gates": GatesCall,
            "gated_rms_norm": GatedNormCall,
            "delta_step": DeltaStepCall,
            "mamba2_step": Mamba2StepCall,
            "selective_scan": SelectiveScanCall,
            "rg_lru": RgLruCall,
        },
        cuda=("linear_attention", "delta_step", "mamba2_step"),
        native=(
            "causal_conv",
            "linear_attention",
            "delta_gates",
            "gated_rms_norm",
            "selective_scan",
            "rg_lru",
        ),
        on_native=("delta_step", "mamba2_step"),
    ),
)
