"""A kernel report as a rich table: equal layers folded, unmatched kernels named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table

from torchpaged.profiling.kernel_report.data import COMPILED, KernelTime, UnmatchedKernels
from torchpaged.profiling.kernel_report.layers import ITSELF, layer_groups, unmatched_groups
from torchpaged.profiling.kernel_report.report import KernelReport


def report_table(report: KernelReport, title: str = "") -> Table:
    """Columns: module, kernels, count, total us, share. Long kernel names are shortened; ``report.to_dict()``
    has them whole."""
    total = report.total_us
    head = (
        f"{title}{': ' if title else ''}{_number(report.count / report.steps)} {report.kind}s, "
        f"{total / report.steps:.1f} us"
    )
    head += f" a step, {report.steps} steps" if report.steps > 1 else ""
    table = Table(title=escape(head), title_justify="left")
    table.add_column("module", no_wrap=True)
    table.add_column(f"{report.kind}s", overflow="fold")
    for name in ("count", "total us", "share"):
        table.add_column(name, justify="right")

    def row(name: str, kernels: str, count: int, total_us: float, style: str | None = None) -> None:
        share = f"{total_us / total:.1%}" if total else "-"
        table.add_row(escape(name), escape(kernels), str(count), f"{total_us:.1f}", share, style=style)

    for group in layer_groups(report):
        if not group.indices:
            row(
                group.name,
                _names(kernel for entry in group.modules for kernel in entry.kernels),
                group.count,
                group.total_us,
            )
            continue
        row(
            group.name,
            f"{_number(group.kernels_each)} {report.kind}s each",
            group.count,
            group.total_us,
            "bold",
        )
        for entry in group.modules:
            row(
                f"  {entry.module}" if entry.module == ITSELF else f"  .{entry.module}",
                _names(entry.kernels),
                entry.count,
                entry.total_us,
            )
        for unplaced in group.unmatched:
            row(
                f"  unmatched, {_between(unplaced)}",
                _names(unplaced.kernels),
                unplaced.count,
                unplaced.total_us,
                "yellow",
            )
    for unplaced in unmatched_groups(report):
        row(
            f"unmatched, {_between(unplaced)}",
            _names(unplaced.kernels),
            unplaced.count,
            unplaced.total_us,
            "yellow",
        )
    if report.missing:
        missing = Counter({kernel.name: 0 for entry in report.missing for kernel in entry.kernels})
        for entry in report.missing:
            missing.update({kernel.name: kernel.count for kernel in entry.kernels})
        names = _names(KernelTime(name, count) for name, count in missing.items())
        table.caption = escape(
            f"not in the replay, though in the eager step: {sum(missing.values())} {report.kind}s: {names}"
        )
    return table


def short_name(kernel: str) -> str:
    """Without template arguments, parameters and return type."""
    name = re.sub(r"^(?:void|static) ", "", kernel)
    cut = re.match(r"[^<(]+", name)
    return cut[0].strip() if cut else name


def _names(kernels: Iterable[KernelTime]) -> str:
    return ", ".join(dict.fromkeys(short_name(kernel.name) for kernel in kernels))


def _between(row: UnmatchedKernels) -> str:
    if row.between.after == COMPILED:
        return "in compiled code" + (f" called by {row.between.before}" if row.between.before else "")
    after, before = ("(outside the model)" if name is None else name for name in row.between)
    parts = [f"after {after}" if after else "", f"before {before}" if before else ""]
    return " and ".join(part for part in parts if part) or "place unknown"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
