"""Which architectures of transformers run right through a `PagedCache`, and which encoders without one; tiny
and random.

    python tests/support/cover_models.py --arch llama --output coverage.json --page coverage.md

The work is in ``model_coverage``. The exit status is 1 if a row is wrong or broken.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import model_coverage
import typer
from model_coverage import Table, markdown
from model_coverage.kinds import KINDS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torchpaged.custom_ops.errors import ArgumentError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_BAD = ("wrong", "broken")


def _chosen(names: Sequence[str], kind: str) -> list[str]:
    if kind not in KINDS:
        raise ArgumentError("--kind", f"one of {', '.join(KINDS)}", repr(kind))
    known = KINDS[kind].model_types()
    for name in names:
        if name not in known:
            why = KINDS[kind].left_out.get(name, f"no {kind} of this transformers has that model type")
            raise ArgumentError("--arch", "a model type of transformers such as llama", f"{name!r} ({why})")
    return list(names) or known


@app.command()
def cover_models(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="a model type of transformers; may be given several times; default: all"),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="decoder, encoder, encoder-decoder or vision-language")
    ] = "decoder",
    output: Annotated[Path, typer.Option(help="JSON file of the rows; a run goes on from it")] = Path(
        "coverage.json"
    ),
    page: Annotated[Path | None, typer.Option(help="write the rows as a Markdown page to this file")] = None,
    with_tables: Annotated[
        list[Path] | None, typer.Option(help="another version's JSON file to show on the page, too")
    ] = None,
    workers: Annotated[int, typer.Option(help="processes at a time", min=1)] = 1,
    seconds: Annotated[float | None, typer.Option(help="begin nothing new after so long")] = None,
    compiled: Annotated[
        bool,
        typer.Option("--compiled/--no-compiled", help="check the compiled decode step, and count its graphs"),
    ] = True,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="examine again what the output holds already")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Examine what is missing in OUTPUT, rows of these versions being kept, and write it there after each
    architecture."""
    console = Console(stderr=as_json)
    chosen, table = _chosen(arch or [], kind), Table(kind=kind)
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
        for row in model_coverage.cover(
            missing, workers=workers, compiled=compiled, seconds=seconds, kind=kind
        ):
            table.rows[row.model_type] = row
            table.save(output)
            progress.advance(task)
            graphs = "" if row.graphs is None else f", {row.graphs} graph{'s' * (row.graphs != 1)}"
            console.print(
                f"{row.model_type}: {row.mode}{graphs} ({row.seconds} s) {row.reason}",
                markup=False,
                highlight=False,
            )
    if page is not None:
        page.write_text(markdown([table, *(Table.load(path) for path in with_tables or [])]))
    counts = table.counts()
    if as_json:
        print(json.dumps({"versions": table.versions, "counts": counts, "output": str(output)}))
    else:
        console.print(", ".join(f"{count} {mode}" for mode, count in counts.items()), markup=False)
    raise typer.Exit(int(any(table.rows[name].mode in _BAD for name in chosen if name in table.rows)))


if __name__ == "__main__":
    app()
