"""``torchpaged tune``: its options, typed; the work is in ``torchpaged.bench.tune``, imported when needed."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def tune(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    backends: Annotated[
        str, typer.Option(help="separated by commas; default: all that can run here but the reference")
    ] = "",
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="cases, as of bench attention; may be given several times; default: decode, mixed and "
            "prefill, on a CPU smoke"
        ),
    ] = None,
    case: Annotated[str, typer.Option(help="keep cases whose name contains this")] = "",
    repeats: Annotated[int, typer.Option(help="samples per backend and case at least")] = 12,
    output: Annotated[str, typer.Option(help="write all figures to this JSON file, after every case")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would be measured, and do nothing")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")] = False,
) -> None:
    """Measure the backends on this device, and keep their order for the automatic choice."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from torchpaged.bench.tune import TuneOptions
    from torchpaged.bench.tune import plan as plan_of
    from torchpaged.bench.tune import tune as measure

    names = tuple(name.strip() for name in backends.split(",") if name.strip())
    options = TuneOptions(device, names, tuple(suite or ()), case, repeats, output, save=True, quiet=as_json)
    document: dict[str, Any] = plan_of(options) if dry_run else measure(options)
    if as_json:
        print(json.dumps(document))
        return
    console = Console()
    if dry_run:
        shown = Table("backend", "measured", "why not", title=document["device"], title_justify="left")
        for name, reason in document["backends"].items():
            shown.add_row(name, "no" if reason else "yes", escape(reason or ""))
        console.print(shown)
        console.print(f"{len(document['cases'])} cases: {'; '.join(document['cases'])}", markup=False)
        console.print(f"would be written: {document['file']}", markup=False)
        return
    for name, reason in document["unfit"].items():
        console.print(f"left out: {name}: {reason}", markup=False)
    console.print(f"decode: {', '.join(document['decode'])}", markup=False)
    console.print(f"prefill and mixed: {', '.join(document['prefill'])}", markup=False)
    console.print(f"written: {document['file']}", markup=False)
