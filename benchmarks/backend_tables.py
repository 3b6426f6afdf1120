"""The tables of docs/backends.md: what the backends declare, and in which order they are tried.

python benchmarks/backend_tables.py     # writes them anew
"""

import re
from collections.abc import Sequence
from pathlib import Path

from torchpaged.backends import get_backend, list_backends
from torchpaged.backends.capabilities import Capabilities
from torchpaged.backends.choose.select import PLATFORMS
from torchpaged.backends.features import FEATURES, SHORT

PAGE = Path(__file__).parents[1] / "docs" / "backends.md"
_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_DTYPES |= {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


def capability_tables() -> str:
    """Two tables: what runs where, and which features each backend serves."""
    where = [("backend", "device", "dtype", "cached", "head_dim", "CUDA graphs", "plan")]
    own = ("mods", "inv", "dim_v")
    what = [("backend", *SHORT.values(), *own)]
    for name in list_backends():
        can = get_backend(name).capabilities
        dtypes, cached = (
            " ".join(_DTYPES[str(dtype).removeprefix("torch.")] for dtype in of)
            for of in (can.dtypes, can.kv_dtypes)
        )
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


def platform_table() -> str:
    """The order on each kind of device."""
    lines = ["| platform | compute capability | tried first | evidence |", "|---|---|---|---|"]
    for row in PLATFORMS:
        ends = ["–"] if row.capabilities is None else [f"{a}.{b}" for a, b in dict.fromkeys(row.capabilities)]
        order = ", ".join(f"`{name}`" for name in row.order)
        lines.append(f"| {row.name} | {' to '.join(ends)} | {order} | {row.evidence} |")
    return "\n".join([*lines, ""])


TABLES = {"backends": capability_tables, "platforms": platform_table}


def made(page: str) -> str:
    """The page with the tables as the code has them."""

    def make(match: re.Match[str]) -> str:
        return f"<!-- made: {match[1]} -->\n{TABLES[match[1]]()}<!-- end -->"

    return re.sub(r"<!-- made: (\w+) -->.*?<!-- end -->", make, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(made(PAGE.read_text()))
