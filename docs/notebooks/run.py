"""Runs the notebooks of this folder and stores what their cells print.

    python docs/notebooks/run.py            # says which outputs are not what is stored; exit status 1 then
    python docs/notebooks/run.py --write    # stores them

Plain Python runs the cells, one after the other in one namespace, so that no kernel of Jupyter is needed; the
value of a cell's last expression is its output, as there.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def run_cell(source: str, name: str, space: dict[str, Any]) -> str:
    """What the cell prints, and the repr of its last expression."""
    tree, last = ast.parse(source), None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(tree, name, "exec"), space)
        if last is not None and (value := eval(compile(last, name, "eval"), space)) is not None:
            print(repr(value))
    return printed.getvalue()


def stored(cell: dict[str, Any]) -> str:
    """The output that a notebook holds of a cell."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run_notebook(path: Path) -> list[tuple[dict[str, Any], str]]:
    """Each cell of code, and what it gave."""
    space: dict[str, Any] = {"__name__": "__notebook__"}
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return [
        (cell, run_cell("".join(cell["source"]), f"{path.name}, cell {number}", space))
        for number, cell in enumerate(cells, 1)
    ]


def write(path: Path) -> None:
    """Store what the cells give now."""
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, (_, text)) in enumerate(zip(code, run_notebook(path), strict=True), 1):
        lines = text.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        cell["execution_count"] = number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="store what the cells give")
    wanted = parser.parse_args().write
    other = 0
    for path in sorted(FOLDER.glob("*.ipynb")):
        if wanted:
            write(path)
            continue
        for cell, text in run_notebook(path):
            if text != stored(cell):
                print(f"{path.name}: stored {stored(cell)!r}, got {text!r}", file=sys.stderr)
                other += 1
    return int(other > 0)


if __name__ == "__main__":
    sys.exit(main())
