"""The command line: ``torchpaged generate | bench | backends | env``.

typer and rich belong to the ``demo`` and ``bench`` extras; only the command modules and the bench's screen
import them.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ImportError as _error:  # pragma: no cover - depends on the installation
    raise SystemExit(
        f"torchpaged's command line needs {_error.name}; pip install 'torchpaged[demo]'"
    ) from None

from torchpaged.cli.backends import Asked, backends
from torchpaged.cli.bench import app as bench_app
from torchpaged.cli.commands import command_of
from torchpaged.cli.settings import Settings
from torchpaged.custom_ops import variables
from torchpaged.custom_ops.errors import TorchpagedError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Paged-KV attention: text out of a model, what runs here and why, and benchmarks.",
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")


def generate(settings: Settings) -> None:
    """Generate text, streamed as it comes, with a summary line at the end."""
    settings.check()
    if settings.offline:
        os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    from torchpaged.cli.generate import run

    raise typer.Exit(run(settings))


app.command()(command_of(Settings, generate))
app.command()(command_of(Asked, backends))


@app.command(name="env")
def environment(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Versions, kernels, devices and variables, for bug reports."""
    from torchpaged.cli.report import collect

    report = collect()
    if as_json:
        print(json.dumps(report))
        return
    console = Console()
    for section, content in report.items():
        if not isinstance(content, dict):
            console.print(f"[bold]{section}[/bold]: {content}")
            continue
        table = Table(title=section, title_justify="left", show_header=False)
        for key, value in content.items():
            shown = (
                f"{value['value'] or value['default']}  ({value['meaning']})"
                if isinstance(value, dict) and "meaning" in value
                else value
            )
            table.add_row(key, escape(str(shown)))
        console.print(table)


def main() -> Any:
    """Entry point: errors are one line and exit code 2; TORCHPAGED_DEBUG=1 shows tracebacks."""
    debug = False
    try:
        debug = variables.get("TORCHPAGED_DEBUG")
        for variable in variables.VARIABLES:
            if variable.name in os.environ:
                variables.get(variable.name)
        return app()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except (TorchpagedError, OSError, ValueError) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
