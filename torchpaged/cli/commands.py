"""Commands of typer out of dataclasses: an option for each field, declared by `torchpaged.names.option`; and
lines of reports."""

import dataclasses
import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import Annotated, Any, TextIO, TypeVar, get_type_hints

import typer

Record = TypeVar("Record")


def command_of(record: type[Record], run: Callable[[Record], None]) -> Callable[..., None]:
    """``run`` as a command, which is given ``record`` made of the options; a field without a default is an
    argument, one without a help text is not offered."""
    hints = get_type_hints(record)

    def command(**given: Any) -> None:
        run(record(**{name: value for name, value in given.items() if value is not None}))

    parameters = []
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        if not field.metadata:
            continue
        words, flags, limits = (field.metadata[key] for key in ("help", "flags", "limits"))
        required = field.default is dataclasses.MISSING
        by_place = field.metadata["argument"]
        default = inspect.Parameter.empty if required else field.default
        callback = _require_text if default == "" else None
        option = typer.Option(*flags, help=words, callback=callback, **limits)
        asked = typer.Argument(help=words) if by_place else option
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                # click 8.1 refuses another default of an argument that takes several values
                default=None if by_place and not required else default,
                annotation=Annotated[hints[field.name], asked],
            )
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    return command


def _require_text(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """Refuse an empty text that was typed, as of a shell's variable that is not set: it is no default."""
    source = context.get_parameter_source(str(parameter.name))
    if not value and source is not None and source.name == "COMMANDLINE":  # typer has a click of its own
        raise typer.BadParameter("expected text, got none; leave the option out for its default")
    return value


def show(line: str, to: TextIO | None = None) -> None:
    """Print a line. On a terminal what has no room goes on below, four columns further in, broken between
    words alone; a file or a pipe gets it as it is, for grep and for copies.

    Args:
        line: without a line break.
        to: default: stdout.
    """
    out = sys.stdout if to is None else to
    if out.isatty():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        columns = shutil.get_terminal_size().columns
        line = textwrap.fill(
            line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    print(line, file=out)
