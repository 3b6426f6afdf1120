"""What a backend declares it can do, as data."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

import torch

from torchpaged.backends.features import COMMON_FEATURES, FEATURES, LATENT_FEATURES
from torchpaged.backends.spec import AttentionSpec, GraphSupport, require_known
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.custom_ops.words import repr_of_fields


class Planning(IntEnum):
    """When a session's `plan` must run.

    The runner of a graph calls it outside the graph: before the warm-up and the capture where it is not
    NEVER, and before every replay where it is EVERY_STEP. Eager code calls it for every batch where it is
    not NEVER.
    """

    NEVER = 0  #: The op takes everything from its arguments.
    AT_CAPTURE = 1  #: The plan depends on shapes alone.
    EVERY_STEP = 2  #: The plan depends on lengths or on the block table.


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do, as data: `reject` turns it into sentences.

    The first four fields are required, the others have defaults. Where None means "any" it is the default.

    Attributes:
        device_types: such as ``("cuda",)``; required.
        dtypes: of queries and outputs; required.
        kv_dtypes: of pools; required.
        graph_support: which batches a captured graph may serve; required.
        min_compute_capability: of NVIDIA GPUs, ``(major, minor)``; None = any.
        head_dims: the widths that ``paged_attention`` takes; None = any.
        max_head_dim: the largest of them; None = any.
        block_sizes: tokens per block that it takes; None = any.
        different_head_dim_v: whether values may be narrower or wider than keys; default True.
        features: those of `torchpaged.backends.features.FEATURES` that it has; default
            ``COMMON_FEATURES`` there. Its op is never given others.
        max_latent: the largest widths of latents and of rotated keys that its ``mla_attention`` takes; None
            = any.
        fp8_latents: whether rows of latents may be of fp8; default False.
        planning: when its sessions want `Session.plan`; default `Planning.NEVER`.
        finite_pools: whatever lies in a pool must be finite, also where nothing was written or may be read,
            since what a query must not see is multiplied by 0; zeros, as `PagedKVCache` has, are. Default
            False.
        mods: whether it takes functions of the user's, `AttentionSpec.score_mod` and ``mask_mod``; default
            False.
        batch_invariant: a request's bits do not depend on the others in the batch, where its spec asks for
            that; `torchpaged.testing.check_batch_invariance` proves it. Default False.
        max_query_len: the most query tokens of one request; None = any.
        deterministic: equal calls give equal bits; default True.
        further: gives reasons against a spec that follow from more than one thing at once, or from the
            machine; None = there are none.

    Raises:
        ValueError: a name in ``features`` that is not in `FEATURES`.
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
    features: frozenset[str] = COMMON_FEATURES
    max_latent: tuple[int, int] | None = None
    fp8_latents: bool = False
    planning: Planning = Planning.NEVER
    finite_pools: bool = False
    mods: bool = False
    batch_invariant: bool = False
    max_query_len: int | None = None
    deterministic: bool = True
    further: Callable[[AttentionSpec], list[str]] | None = None

    __repr__ = repr_of_fields

    def __post_init__(self) -> None:
        require_known("features", self.features, FEATURES)

    def reject(self, spec: AttentionSpec) -> list[str]:
        """Every reason why ``spec`` can't run; empty if it can."""
        reasons = []
        if spec.device.type not in self.device_types:
            reasons.append(f"device {spec.device.type} is not one of {', '.join(self.device_types)}")
        if self.min_compute_capability and spec.device.type == "cuda" and torch.cuda.is_available():
            have = torch.cuda.get_device_capability(spec.device)
            if torch.version.hip is None and have < self.min_compute_capability:
                reasons.append(f"compute capability {have} is below {self.min_compute_capability}")
        reasons += self.reject_kind(spec.dtype, spec.kv_dtype or spec.dtype, spec.features)
        reasons += self._reject_latent(spec) if "latent" in spec.uses else self._reject_widths(spec)
        if (
            self.block_sizes is not None
            and spec.block_size is not None
            and spec.block_size not in self.block_sizes
        ):
            reasons.append(f"block_size {spec.block_size} is not one of {self.block_sizes}")
        if self.max_query_len is not None and (spec.max_query_len or 1 << 62) > self.max_query_len:
            wanted = "any length" if spec.max_query_len is None else f"{spec.max_query_len} tokens"
            reasons.append(f"queries of {wanted} are over {self.max_query_len}")
        if spec.deterministic and not self.deterministic:
            reasons.append("equal calls may give other bits, and deterministic was asked for")
        if spec.graphs > self.graph_support:
            reasons.append(f"graph support {self.graph_support.name} is less than {spec.graphs.name}")
        if spec.mods and not self.mods:
            reasons.append("score_mod and mask_mod are not supported: its kernels take no functions")
        if spec.batch_invariant and not self.batch_invariant:
            reasons.append("batch_invariant is not declared: a request's bits may depend on the others")
        return reasons if self.further is None else reasons + self.further(spec)

    def _reject_widths(self, spec: AttentionSpec) -> list[str]:
        reasons = []
        if self.head_dims is not None and spec.head_dim not in self.head_dims:
            reasons.append(f"head_dim {spec.head_dim} is not one of {self.head_dims}")
        if self.max_head_dim is not None and max(spec.head_dim, spec.head_dim_v or 0) > self.max_head_dim:
            reasons.append(f"head_dim {max(spec.head_dim, spec.head_dim_v or 0)} is over {self.max_head_dim}")
        if spec.head_dim_v not in (None, spec.head_dim) and not self.different_head_dim_v:
            reasons.append(f"head_dim_v {spec.head_dim_v} differs from head_dim {spec.head_dim}")
        return reasons

    def _reject_latent(self, spec: AttentionSpec) -> list[str]:
        rank = spec.head_dim_v or spec.head_dim
        sizes, most = (rank, spec.head_dim - rank), self.max_latent
        reasons = []
        if most is not None and (sizes[0] > most[0] or sizes[1] > most[1]):
            reasons.append(f"a latent of {sizes[0]} + {sizes[1]} is over {most[0]} + {most[1]}")
        kv_dtype = spec.kv_dtype or spec.dtype
        if kv_dtype != spec.dtype and not self._takes_rows(kv_dtype, ["latent"]):
            reasons.append(f"a latent cache of {_short(kv_dtype)} is not supported")
        used = [name for name in spec.features if name not in LATENT_FEATURES]
        asked = (("score_mod or mask_mod", spec.mods), ("batch_invariant", spec.batch_invariant))
        used += [name for name, is_asked in asked if is_asked]
        return reasons + [f"{name} is not supported over latents" for name in used]

    def _takes_rows(self, kv_dtype: torch.dtype, features: Iterable[str]) -> bool:
        """Whether pools are those of `fp8_latents`."""
        return self.fp8_latents and kv_dtype == torch.float8_e4m3fn and "latent" in features

    def reject_kind(self, dtype: torch.dtype, kv_dtype: torch.dtype, features: Iterable[str]) -> list[str]:
        """What of `reject` needs no sizes, which a trace may have as symbols; ``features``: of `FEATURES`."""
        reasons = []
        if dtype not in self.dtypes:
            reasons.append(f"dtype {_short(dtype)} is not one of {', '.join(map(_short, self.dtypes))}")
        if kv_dtype not in self.kv_dtypes and not self._takes_rows(kv_dtype, features):
            reasons.append(
                f"kv dtype {_short(kv_dtype)} is not one of {', '.join(map(_short, self.kv_dtypes))}"
            )
        return reasons + [
            f"{'bidirectional attention' if feature == 'bidirectional' else feature} is not supported"
            for feature in features
            if feature not in self.features
        ]


def further_reasons(
    spec: AttentionSpec, *, width: int = 1, majors: tuple[int, ...] | None = None, gpus: str = ""
) -> list[str]:
    """Of `Capabilities.further`, what several libraries say: pools of other dtypes than the queries', a width
    that is no multiple of ``width``, and a GPU of none of the ``majors``, in the words of ``gpus``."""
    reasons = []
    if spec.kv_dtype not in (None, spec.dtype):
        reasons.append(f"kv dtype {spec.kv_dtype} is not the queries' {spec.dtype}")
    if spec.head_dim % width:
        reasons.append(f"head_dim {spec.head_dim} is no multiple of {width}")
    if majors is not None and spec.device.type == "cuda" and torch.cuda.is_available():
        have = torch.cuda.get_device_capability(spec.device)
        if have[0] not in majors:
            reasons.append(f"compute capability {have} is {gpus}")
    return reasons


def unable(name: str, *reasons: str) -> BackendUnavailableError:
    """What the backend ``name`` can't run, with all reasons."""
    return BackendUnavailableError(f"backend {name!r} cannot run this attention: {'; '.join(reasons)}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
