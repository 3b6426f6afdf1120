"""What the backends declare: data, and the tables of docs/backends.md (`torchpaged backends --table`)."""

from collections.abc import Sequence
from typing import Any

import torch

from torchpaged.backends.capabilities import Capabilities
from torchpaged.backends.choose.names import ALIASES, get_backend, list_backends
from torchpaged.backends.features import FEATURES, SHORT

_SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
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


def capability_tables() -> str:
    """Two tables in Markdown: what runs where, and which features each backend serves."""
    where = [("backend", "device", "dtype", "cached", "head_dim", "CUDA graphs", "plan")]
    own = ("mods", "inv", "dim_v")
    what = [("backend", *SHORT.values(), *own)]
    for name in list_backends():
        can = get_backend(name).capabilities
        dtypes, cached = (" ".join(_SHORT[dtype] for dtype in of) for of in (can.dtypes, can.kv_dtypes))
        plan = can.planning.name.lower().replace("_", " ")
        graphs = can.graph_support.name.lower().replace("_", " ")
        where.append((f"`{name}`", _device(can), dtypes, cached, _widths(can), graphs, plan))
        has = [*(feature in can.features for feature in FEATURES), can.mods, can.batch_invariant]
        what.append(
            (f"`{name}`", *("yes" if one else "–" for one in has), "any" if can.different_head_dim_v else "=")
        )
    return "\n".join([*_markdown(where), "", *_markdown(what), ""])


def _device(can: Capabilities) -> str:
    least = can.min_compute_capability
    shown = {"cuda": f"GPU ≥ {least[0]}.{least[1]}" if least else "GPU", "cpu": "CPU"}
    return ", ".join(shown.get(kind, kind) for kind in can.device_types)


def _widths(can: Capabilities) -> str:
    if can.head_dims is not None:
        return " ".join(map(str, can.head_dims))
    return "any" if can.max_head_dim is None else f"≤ {can.max_head_dim}"


def _markdown(rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]
