"""``torchpaged coverage``: which architectures of transformers run right through a `PagedCache`, and which
encoders without one; the work is in ``torchpaged.testing.coverage``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torchpaged.custom_ops.errors import ArgumentError

_BAD = ("wrong", "broken")


def _chosen(names: Sequence[str], kind: str) -> list[str]:
    from torchpaged.testing.coverage.kinds import KINDS

    if kind not in KINDS:
        raise ArgumentError("--kind", f"one of {', '.join(KINDS)}", repr(kind))
    known = KINDS[kind].model_types()
    for name in names:
        if name not in known:
            why = KINDS[kind].left_out.get(name, f"no {kind} of this transformers has that model type")
            raise ArgumentError("--arch", "a model type of transformers such as llama", f"{name!r} ({why})")
    return list(names) or known


def run(
    names: Sequence[str],
    output: Path,
    pages: Path | None,
    beside: Sequence[Path],
    *,
    workers: int,
    seconds: float | None,
    compiled: bool,
    fresh: bool,
    as_json: bool,
    kind: str = "decoder",
) -> int:
    """Examine what is missing in ``output``, and write it there after each architecture.

    Args:
        names: model types; empty: all.
        output: JSON file; rows of these versions in it are kept; ``fresh``: but not those of ``names``.
        pages: Markdown file to write at the end, of ``output`` and the tables in ``beside``.
        workers, seconds, compiled: as for `torchpaged.testing.coverage.cover`.
        as_json: print one JSON document and nothing else.
        kind: "decoder", "encoder", "encoder-decoder" or "vision-language".

    Returns:
        1 if a row is wrong or broken, else 0.
    """
    from torchpaged.testing.coverage import Table, cover, markdown

    console = Console(stderr=as_json)
    chosen, table = _chosen(names, kind), Table(kind=kind)
    if output.exists():
        before = Table.load(output)
        if before.kind != kind:
            raise ArgumentError(
                "--output", f"a file of kind {kind}", f"{output}, which is of kind {before.kind}"
            )
        if before.versions == table.versions:
            table = before
        else:
            console.print(f"{output} is of {before.versions}; starting anew", markup=False)
    missing = [name for name in chosen if fresh or name not in table.rows]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=as_json or not sys.stderr.isatty()) as progress:
        task = progress.add_task("architectures", total=len(chosen), completed=len(chosen) - len(missing))
        for row in cover(missing, workers=workers, compiled=compiled, seconds=seconds, kind=kind):
            table.rows[row.model_type] = row
            table.save(output)
            progress.advance(task)
            graphs = "" if row.graphs is None else f", {row.graphs} graph{'s' * (row.graphs != 1)}"
            console.print(
                f"{row.model_type}: {row.mode}{graphs} ({row.seconds} s) {row.reason}",
                markup=False,
                highlight=False,
            )
    if pages is not None:
        pages.write_text(markdown([table, *(Table.load(path) for path in beside)]))
    counts = table.counts()
    if as_json:
        print(json.dumps({"versions": table.versions, "counts": counts, "output": str(output)}))
    else:
        console.print(", ".join(f"{count} {mode}" for mode, count in counts.items()), markup=False)
    return int(any(table.rows[name].mode in _BAD for name in chosen if name in table.rows))
