"""What a reader sees while the benchmark runs and at its end, on stderr: a progress bar, a line per case,
the table.

With rich there is a live bar and a table that fits the terminal; without it, plain lines. Stdout is left to
the JSON line.
"""

import importlib.util
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

_WIDTH = 170  # columns of the table where stderr is not a terminal


class Screen:
    """A context manager around a run: `step` before each contender, `row` after each case, `finish` after the
    last one.

    Args:
        total: steps to come.
        enabled: False shows nothing.
    """

    def __init__(self, total: int, enabled: bool = True) -> None:
        self.enabled, self.total = enabled, total
        self.console: Any = None
        self.bar: Any = None
        self.task: Any = None
        if enabled and importlib.util.find_spec("rich") is not None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self.console = Console(
                stderr=True, highlight=False, width=None if sys.stderr.isatty() else _WIDTH
            )
            columns = (
                TextColumn("benchmark"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
            )
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        """One line."""
        if self.console is not None:
            self.console.print(text, markup=False, soft_wrap=True)
        elif self.enabled:
            print(text, file=sys.stderr, flush=True)

    def step(self, description: str) -> None:
        """The next contender of the next case begins."""
        if self.bar is not None:
            self.bar.update(self.task, advance=1, description=description.replace("[", r"\["))

    def row(self, row: dict[str, Any]) -> None:
        """A case is done."""
        if "skipped" in row:
            self.say(f"{row['case']}: skipped: {row['skipped']}")
            return
        times = ", ".join(
            f"{name} {e['us']:.1f}" for name, e in row["contenders"].items() if e["status"] == "timed"
        )
        self.say(f"{row['case']}: ideal {row['ideal_us']:.1f} us; {times or 'nothing timed'}")
        for name, entry in row["contenders"].items():
            if entry["status"] in ("wrong", "failed"):
                self.say(f"  {name} {entry['status']}: {entry['reason']}")

    def finish(self, document: dict[str, Any]) -> None:
        """The table of all cases, and its notes."""
        self.table("microseconds per call, median (rate)", *table(document["rows"]))
        for text in notes(document):
            self.say(text)

    def table(self, title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        """A table whose first column is text and whose others are figures."""
        if self.console is not None:
            from rich.table import Table

            shown = Table(*header, title=title, title_justify="left")
            for column in shown.columns[1:]:
                column.justify = "right"
            for line in lines:
                shown.add_row(*line)
            self.console.print(shown)
        elif self.enabled:
            widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
            for line in (header, *lines):
                self.say("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _rate(row: dict[str, Any], entry: dict[str, Any]) -> str:
    value, unit = (entry["tb_per_s"], "B/s") if row["bound"] == "memory" else (entry["tflop_per_s"], "FLOP/s")
    value, prefix = (value, "T") if value >= 0.1 else (value * 1000, "G")
    return f"{value:.{2 if value < 10 else 0}f} {prefix}{unit}"


def _cell(row: dict[str, Any], entry: dict[str, Any]) -> str:
    if entry["status"] != "timed":
        return "-" if entry["status"] in ("absent", "unsupported") else entry["status"]
    return f"{entry['us']:.1f} ({_rate(row, entry)})"


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines; contenders that no case could run have no column (`notes` names them)."""
    entries = [(name, entry) for row in rows for name, entry in row["contenders"].items()]
    names = list(
        dict.fromkeys(name for name, entry in entries if entry["status"] not in ("absent", "unsupported"))
    )
    lines = []
    for row in rows:
        cells = [
            _cell(row, row["contenders"][name]) if name in row["contenders"] else "skipped" for name in names
        ]
        lines.append([row["case"], f"{row['ideal_us']:.1f}", *cells])
    return ["case", "ideal", *names], lines


def notes(document: dict[str, Any]) -> list[str]:
    """Lines under the table: ceilings, absences, what is unsupported, plan times, what went wrong."""
    rows, summary, ceilings = document["rows"], document["summary"], document["ceilings"]
    lines = [
        f"ideal: useful bytes at {ceilings['bytes_per_s'] / 1e12:.3g} TB/s "
        f"({ceilings['bytes_per_s_from']}) or FLOPs at "
        f"{ceilings['flop_per_s'] / 1e12:.3g} TFLOP/s ({ceilings['flop_per_s_from']}), whichever takes longer"
    ]
    entries = [(name, entry) for row in rows for name, entry in row["contenders"].items()]
    reasons = Counter(
        (name, entry["status"], entry["reason"])
        for name, entry in entries
        if entry["status"] in ("absent", "unsupported")
    )
    plans: dict[str, list[float]] = {}
    for name, entry in entries:
        if "plan_us" in entry:
            plans.setdefault(name, []).append(entry["plan_us"])
    lines += [
        f"{name} {status} in {count} of {len(rows)} cases: {reason}"
        for (name, status, reason), count in reasons.items()
    ]
    lines += [
        f"{name}: plan takes {min(times):.0f} to {max(times):.0f} us on the host, not included"
        for name, times in plans.items()
    ]
    lines += [f"{case} skipped: {reason}" for case, reason in summary["skipped"].items()]
    return lines + summary["wrong_or_failed"]
