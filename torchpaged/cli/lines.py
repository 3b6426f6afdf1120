"""Lines of reports: on a terminal wrapped to its width, whole where they are piped."""

import shutil
import sys
import textwrap
from typing import TextIO


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
