"""A kernel report as a rich table: equal layers folded, unmatched kernels named."""

import re
from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table

from torchpaged.profiling.kernel_report.report import (
    COMPILED,
    ITSELF,
    Between,
    KernelReport,
    Row,
    Runs,
    layer_groups,
    unmatched_outside_layers,
)


def report_table(report: KernelReport, title: str = "") -> Table:
    """Columns: module, kernels, count, total us, share. Long kernel names are shortened; ``report.to_dict()``
    has them whole."""
    total = report.rows.total
    head = (
        f"{title}{': ' if title else ''}{_number(total.count / report.steps)} {report.kind}s, "
        f"{total.total_us / report.steps:.1f} us"
    )
    head += f" a step, {report.steps} steps" if report.steps > 1 else ""
    table = Table(title=escape(head), title_justify="left")
    table.add_column("module", no_wrap=True)
    table.add_column(f"{report.kind}s", overflow="fold")
    for name in ("count", "total us", "share"):
        table.add_column(name, justify="right")

    def line(name: str, kernels: str, runs: Runs, style: str | None = None) -> None:
        share = f"{runs.total_us / total.total_us:.1%}" if total.total_us else "-"
        table.add_row(
            escape(name), escape(kernels), str(runs.count), f"{runs.total_us:.1f}", share, style=style
        )

    def unmatched(rows: dict[Between, Row], indent: str = "") -> None:
        for between, row in rows.items():
            line(f"{indent}unmatched, {_between(between)}", _names(row), row.total, "yellow")

    for group in layer_groups(report):
        if not group.indices:
            line(group.name, _names(name for row in group.rows.values() for name in row), group.rows.total)
            continue
        each = f"{_number(group.kernels_each)} {report.kind}s each"
        line(group.name, each, group.rows.total, "bold")
        for module, row in group.rows.modules.items():
            line(f"  {'' if module == ITSELF else '.'}{module}", _names(row), row.total)
        unmatched(group.rows.unmatched, "  ")
    unmatched(unmatched_outside_layers(report))
    if report.missing:
        missing = Row()
        for row in report.missing.values():
            missing.add(row)
        table.caption = escape(
            f"not in the replay, though in the eager step: {missing.total.count} {report.kind}s: "
            f"{_names(missing)}"
        )
    return table


def short_name(kernel: str) -> str:
    """Without template arguments, parameters and return type."""
    name = re.sub(r"^(?:void|static) ", "", kernel)
    cut = re.match(r"[^<(]+", name)
    return cut[0].strip() if cut else name


def _names(kernels: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(map(short_name, kernels)))


def _between(between: Between) -> str:
    if between.after == COMPILED:
        return "in compiled code" + (f" called by {between.before}" if between.before else "")
    after, before = ("(outside the model)" if name is None else name for name in between)
    parts = [f"after {after}" if after else "", f"before {before}" if before else ""]
    return " and ".join(part for part in parts if part) or "place unknown"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
