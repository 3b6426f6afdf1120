"""``torchpaged backends``: which backends can run an attention here, and why the others can't."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from torchpaged.backends import (
    AttentionSpec,
    GraphSupport,
    attention_spec,
    get_backend,
    list_backends,
    select_backend,
)
from torchpaged.backends.choose.names import ALIASES, requested
from torchpaged.backends.choose.select import order_of, platform_of
from torchpaged.backends.features import FEATURES, GIVEN
from torchpaged.cli.commands import show
from torchpaged.cli.settings import dtype_named
from torchpaged.custom_ops.errors import TorchpagedError
from torchpaged.names import device_named, option

#: Short names of dtypes.
_SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


@dataclass(frozen=True)
class Asked:
    """The attention that is asked for, and how the answer is printed."""

    head_dim: int = option("width of queries and keys", 128, min=1)
    head_dim_v: int = option("width of values; 0: head_dim", 0, min=0)
    num_heads: int = option("query heads", 32, min=1)
    num_kv_heads: int = option("kv heads", 8, min=1)
    dtype: str = option("bf16, fp16, fp32", "bf16")
    kv_dtype: str = option("of the cache; default: dtype", "")
    block_size: int = option("tokens per block", 16, min=1)
    query_len: int = option("query tokens of a request at most; 0: any", 0, min=0)
    deterministic: bool = option("equal calls must give equal bits", False)
    graphs: str = option("least graph support: never, single_token_decode, uniform_batch, always", "never")
    plans: bool = option("the caller plans each batch, as open_session asks", False)
    backend: str = option("a name, or a route such as decode=cuda,prefill=flash_attn", "auto")
    device: str = option("auto, cpu, cuda", "auto")
    as_json: bool = option("print JSON", False, "--json")
    window: bool = option("sliding window", False)
    soft_cap: bool = option("logits soft cap", False)
    alibi: bool = option("ALiBi", False)
    sinks: bool = option("attention sinks", False)
    chunked: bool = option("attention within chunks of positions", False)
    bidirectional: bool = option("attention without causality", False)
    lse: bool = option("the log-sum-exp is returned, too", False)
    tree: bool = option("query tokens that see some of their request's, not all", False)
    block_sparse: bool = option("blocks of keys seen by a pattern: vertical and slash", False)
    latent: bool = option(
        "mla_attention: latents of head_dim numbers, the first head_dim_v the values", False
    )
    batch_invariant: bool = option("a request's bits don't depend on the others in the batch", False)
    fp8_queries: bool = option("queries of e4m3; --dtype is the output's alone", False)
    output_scale: bool = option("results of e4m3; --dtype is the queries' alone", False)

    def spec(self) -> AttentionSpec:
        """As a backend is asked; raises `typer.BadParameter` or `ArgumentError`."""
        if self.num_heads % self.num_kv_heads:
            raise typer.BadParameter(
                f"expected a divisor of --num-heads ({self.num_heads}), got {self.num_kv_heads}",
                param_hint="--num-kv-heads",
            )
        if self.graphs.upper() not in GraphSupport.__members__:
            known = ", ".join(level.name.lower() for level in GraphSupport)
            raise typer.BadParameter(f"expected one of {known}, got {self.graphs!r}", param_hint="--graphs")
        return attention_spec(
            device=device_named(self.device),
            dtype=dtype_named(self.dtype, "--dtype", of_caches=True),
            head_dim=self.head_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            block_size=self.block_size,
            head_dim_v=self.head_dim_v or None,
            kv_dtype=dtype_named(self.kv_dtype, "--kv-dtype", of_caches=True) if self.kv_dtype else None,
            max_query_len=self.query_len or None,
            deterministic=self.deterministic,
            graphs=GraphSupport[self.graphs.upper()],
            **{name: value for field, (name, value) in _FEATURES.items() if getattr(self, field)},
        )


#: Fields of `Asked` for what an attention uses -> what `attention_spec` is given for them.
_FEATURES: dict[str, tuple[str, Any]] = {
    "window": ("window_size", (128, -1)),
    "soft_cap": ("logits_soft_cap", 1.0),
    "alibi": ("alibi_slopes", True),
    "chunked": ("chunk_size", 128),
    "bidirectional": ("causal", False),
    "tree": ("tree_mask", True),
    "batch_invariant": ("batch_invariant", True),
    **{name: (name, True) for name in GIVEN if name in Asked.__dataclass_fields__},
}


def declared(name: str) -> dict[str, Any]:
    """What a backend declares, in plain values; None means any."""
    can = get_backend(name).capabilities
    row: dict[str, Any] = {
        "devices": list(can.device_types),
        "min_compute_capability": can.min_compute_capability and list(can.min_compute_capability),
        "dtypes": [_SHORT[dtype] for dtype in can.dtypes],
        "kv_dtypes": [_SHORT[dtype] for dtype in can.kv_dtypes],
        "head_dims": can.head_dims and list(can.head_dims),
        "max_head_dim": can.max_head_dim,
        "block_sizes": can.block_sizes and list(can.block_sizes),
        "graph_support": can.graph_support.name,
        "planning": can.planning.name,
        "finite_pools": can.finite_pools,
        "mods": can.mods,
        "batch_invariant": can.batch_invariant,
        "other_names": [alias for alias, own in ALIASES.items() if own == name],
    }
    has = {feature: feature in can.features for feature in FEATURES}
    return row | has | {"different_head_dim_v": can.different_head_dim_v}


def backends(asked: Asked) -> None:
    """What can run an attention here, and why the others can't."""
    spec = asked.spec()
    reasons = {name: get_backend(name).reject(spec) for name in list_backends()}
    route = None
    try:
        choice = select_backend(spec, asked.backend, plans=asked.plans)
        chosen, why, route = choice.name, choice.reason, asdict(choice.route)
    except TorchpagedError as error:
        chosen, why = "", str(error)
    status = 0 if chosen or requested(asked.backend)[0] == "auto" else 2
    if asked.as_json:
        report = {
            "chosen": chosen,
            "route": route,
            "reason": why,
            "order": {"names": order_of(spec.device), "evidence": platform_of(spec.device).evidence},
            "rejected": {name: r for name, r in reasons.items() if r},
            "declared": {name: declared(name) for name in reasons},
        }
        print(json.dumps(report))
        raise typer.Exit(status)
    shown = Table("backend", "usable", "graphs")
    for name, rejected in reasons.items():
        support = get_backend(name).capabilities.graph_support.name
        shown.add_row(name, "no" if rejected else "yes", support)
    Console().print(shown)
    for name, rejected in reasons.items():
        if rejected:  # not in the table, whose width would break what is to be copied
            show(f"{name}: {'; '.join(rejected)}")
    show(f"chosen: {chosen or 'none'} ({why})")
    raise typer.Exit(status)
