"""The command line: ``torchpaged generate | backends | env``.

typer and rich belong to the ``demo`` extra; only the command modules import them.
"""

import io
import json
import os
import sys
from typing import Annotated, Any

try:
    import rich  # noqa: F401 - of the commands
    import typer
except ImportError as _error:  # pragma: no cover - depends on the installation
    raise SystemExit(
        f"torchpaged's command line needs {_error.name}; pip install 'torchpaged[demo]'"
    ) from None

from torchpaged.cli.backends import Asked, backends
from torchpaged.cli.commands import command_of, show
from torchpaged.cli.settings import Settings
from torchpaged.custom_ops import variables
from torchpaged.custom_ops.errors import TorchpagedError
from torchpaged.version import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # its tables cut long names of options
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Paged-KV attention: text of a model, what runs here and why.",
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"torchpaged {__version__}")
        raise typer.Exit


@app.callback()
def _group(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Options of the command itself."""


def generate(settings: Settings) -> None:
    """Generate text, streamed as it comes; a summary at its end."""
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
    for section, content in report.items():
        if not isinstance(content, dict):
            show(f"{section}: {content}")
            continue
        print(f"{section}:")
        for key, value in content.items():
            shown = (
                f"{value['value'] or value['default']}  ({value['meaning']})"
                if isinstance(value, dict) and "meaning" in value
                else value
            )
            show(f"  {key}: {shown}")


def main() -> Any:
    """Entry point: errors are one line and exit code 2; TORCHPAGED_DEBUG=1 shows tracebacks."""
    debug = False
    # None where a caller has closed it: then what is printed is dropped.
    sys.stdout, sys.stderr = (stream or io.StringIO() for stream in (sys.stdout, sys.stderr))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: what an encoding lacks is escaped
    try:
        debug = variables.get("TORCHPAGED_DEBUG")
        for variable in variables.VARIABLES:
            if variable.name in os.environ:
                variables.get(variable.name)
        return app()
    except (KeyboardInterrupt, SystemExit) as ended:
        if isinstance(ended, SystemExit) and ended.code != 130:  # which typer makes of Ctrl-C
            raise
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except (TorchpagedError, OSError, ValueError) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
