"""The rows as a file that a run goes on from, and as a page."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from model_coverage.checks import RUNS, Row
from model_coverage.kinds import KINDS
from torchpaged.custom_ops.errors import ArgumentError


def versions() -> dict[str, str]:
    """What a table holds for: rows of other versions are not mixed into it."""
    return {"transformers": transformers.__version__, "torch": torch.__version__}


@dataclass
class Table:
    """Rows by architecture, of one pair of versions and one of `KINDS`."""

    versions: dict[str, str] = field(default_factory=versions)
    rows: dict[str, Row] = field(default_factory=dict)
    kind: str = "decoder"

    @classmethod
    def load(cls, path: Path) -> Table:
        """The table in a file.

        Raises:
            ArgumentError: the file holds something else.
        """
        try:
            document: dict[str, Any] = json.loads(path.read_text())
            rows = {row["model_type"]: Row(**row) for row in document["rows"]}
            return cls(document["versions"], rows, document.get("kind", "decoder"))
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                "output", "a JSON file that cover_models.py wrote", f"{path}: {error}"
            ) from None

    def save(self, path: Path) -> None:
        """Write the file anew, all at once: a run that is cut leaves the one before."""
        rows = [asdict(self.rows[name]) for name in sorted(self.rows)]
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        new = path.with_name(path.name + ".new")
        head = "" if self.kind == "decoder" else f'  "kind": {json.dumps(self.kind)},\n'
        head += f'  "versions": {json.dumps(self.versions)},\n'
        new.write_text(f'{{\n{head}  "rows": [\n{lines}\n  ]\n}}\n')
        os.replace(new, path)

    def counts(self) -> dict[str, int]:
        """How many rows there are of each mode, and "one graph"."""
        found = Counter(row.mode for row in self.rows.values())
        return {
            **{mode: found[mode] for mode in KINDS[self.kind].modes},
            "one graph": sum(row.is_one_graph for row in self.rows.values()),
        }


#: Modes whose rows are compiled, or say why not.
_COMPILED = (*RUNS, "varlen", "own attention")


def _cells(row: Row | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    compiled = row.checks.get("compiled")
    return row.mode, str(row.graphs) if compiled == "right" else "–" if row.mode in _COMPILED else ""


def _reasons(table: Table) -> list[str]:
    """Those of a table as items of a list, architectures of one reason together."""
    found: dict[str, list[str]] = {}
    for name, row in sorted(table.rows.items()):
        if row.reason:
            # What names the model itself is not a reason of several.
            text = re.sub(rf"^(\w+ForCausalLM|{re.escape(name)}:?) ", "", " ".join(row.reason.split()))
            found.setdefault(textwrap.shorten(text, 240, placeholder=" …"), []).append(name)
    items = [f"- {', '.join(names)}: `{text.replace('`', '')}`" for text, names in found.items()]
    return [
        line
        for item in items
        for line in textwrap.wrap(item, 110, subsequent_indent="  ", break_on_hyphens=False)
    ]


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def markdown(tables: Sequence[Table]) -> str:
    """The page of one or several tables: counts, a line for each architecture, and the reasons.

    Args:
        tables: of one kind, and of different versions of transformers.
    """
    names = [
        f"transformers {table.versions['transformers']}, torch {table.versions['torch'].partition('+')[0]}"
        for table in tables
    ]
    kind = KINDS[tables[0].kind]
    lines = [
        kind.head,
        _line(["", "all", *kind.modes, "one graph"]),
        _line(["---"] + ["--:"] * (len(kind.modes) + 2)),
    ]
    for name, table in zip(names, tables, strict=True):
        lines.append(_line([name, len(table.rows), *table.counts().values()]))
    short = [table.versions["transformers"].rsplit(".", 1)[0] for table in tables]
    heads = [f"{head} {version}" for version in short for head in ("mode", "graphs")]
    second = "layers" if tables[0].kind in ("decoder", "vision-language") else "input"
    lines += ["", _line(["architecture", second, *heads]), _line(["---"] * (2 + 2 * len(tables)))]
    for model_type in sorted({name for table in tables for name in table.rows}):
        rows = [table.rows.get(model_type) for table in tables]
        layers = next(row.kind for row in rows if row is not None)
        lines.append(_line([model_type, layers, *(cell for row in rows for cell in _cells(row))]))
    for name, table in zip(names, tables, strict=True):
        goal = "varlen" if table.kind == "encoder" else "paged"
        lines += ["", f"## Why not {goal}, or not compiled: {name}", "", *_reasons(table)]
    return "\n".join(lines) + "\n"
