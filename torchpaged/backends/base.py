"""What a backend is: capabilities that it declares, op handles that it offers, and hooks around a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchpaged.backends.spec import AttentionSpec, GraphSupport
from torchpaged.custom_ops import BackendOps
from torchpaged.metadata import AttentionMetadata


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do, as data: `reject` turns it into sentences, the README's table is made from it.

    None means "any". ``head_dims`` and ``block_sizes`` list what is supported.
    """

    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    kv_dtypes: tuple[torch.dtype, ...]
    graph_support: GraphSupport
    min_compute_capability: tuple[int, int] | None = None
    head_dims: tuple[int, ...] | None = None
    max_head_dim: int | None = None
    block_sizes: tuple[int, ...] | None = None
    different_head_dim_v: bool = True
    bidirectional: bool = True
    window: bool = True
    logits_soft_cap: bool = True
    alibi: bool = True
    sinks: bool = True
    chunked: bool = True
    lse: bool = True

    def reject(self, spec: AttentionSpec) -> list[str]:
        """Every reason why ``spec`` can't run; empty if it can."""
        reasons = []
        if spec.device.type not in self.device_types:
            reasons.append(f"device {spec.device.type} is not one of {', '.join(self.device_types)}")
        if self.min_compute_capability and spec.device.type == "cuda" and torch.cuda.is_available():
            have = torch.cuda.get_device_capability(spec.device)
            if torch.version.hip is None and have < self.min_compute_capability:
                reasons.append(f"compute capability {have} is below {self.min_compute_capability}")
        if spec.dtype not in self.dtypes:
            reasons.append(f"dtype {_short(spec.dtype)} is not one of {', '.join(map(_short, self.dtypes))}")
        kv_dtype = spec.kv_dtype or spec.dtype
        if kv_dtype not in self.kv_dtypes:
            reasons.append(f"kv dtype {_short(kv_dtype)} is not one of {', '.join(map(_short, self.kv_dtypes))}")
        if self.head_dims is not None and spec.head_dim not in self.head_dims:
            reasons.append(f"head_dim {spec.head_dim} is not one of {self.head_dims}")
        if self.max_head_dim is not None and max(spec.head_dim, spec.head_dim_v or 0) > self.max_head_dim:
            reasons.append(f"head_dim {max(spec.head_dim, spec.head_dim_v or 0)} is over {self.max_head_dim}")
        if self.block_sizes is not None and spec.block_size is not None and spec.block_size not in self.block_sizes:
            reasons.append(f"block_size {spec.block_size} is not one of {self.block_sizes}")
        if spec.head_dim_v not in (None, spec.head_dim) and not self.different_head_dim_v:
            reasons.append(f"head_dim_v {spec.head_dim_v} differs from head_dim {spec.head_dim}")
        if not spec.causal and not self.bidirectional:
            reasons.append("bidirectional attention is not supported")
        for feature in ("window", "logits_soft_cap", "alibi", "sinks", "chunked", "lse"):
            if getattr(spec, feature) and not getattr(self, feature):
                reasons.append(f"{feature} is not supported")
        if spec.graphs > self.graph_support:
            reasons.append(f"graph support {self.graph_support.name} is less than {spec.graphs.name}")
        return reasons


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Backend:
    """One way to run the ops.

    Attributes:
        name: as users type it.
        capabilities: what it declares.
        ops: the op handles; calling ``ops.paged_attention`` is *run*.
        unavailable: returns why the backend can't run on this machine at all, or None.
        plan: called with each new batch before the model runs, outside any trace and capture; None = nothing to plan.
        prepare_for_capture, prepare_for_replay: called by whoever drives a graph runner, before a bucket is captured and
            before each replay, with the bucket's static metadata; None = nothing to do.
        route: says which of its kernels would serve prompts of a spec, and why where that is not the first choice; None = nothing to say.
    """

    name: str
    capabilities: Capabilities
    ops: BackendOps
    unavailable: Callable[[], str | None]
    plan: Callable[[AttentionMetadata], None] | None = None
    prepare_for_capture: Callable[[AttentionMetadata], None] | None = None
    prepare_for_replay: Callable[[AttentionMetadata], None] | None = None
    route: Callable[[AttentionSpec], str] | None = None

    def reject(self, spec: AttentionSpec) -> list[str]:
        """Every reason why ``spec`` can't run on this backend here; empty if it can."""
        missing = self.unavailable()
        return ([missing] if missing else []) + self.capabilities.reject(spec)
