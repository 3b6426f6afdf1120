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

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.testing.coverage.checks import MODES, RUNS, TOLERANCE, Row

_HEAD = """# Architectures

Every decoder architecture that transformers maps to a causal LM, tiny and random, through
`torchpaged.hf.PagedCache` without further arguments, against transformers' own eager attention in float32:
logits within {tolerance} of their scale, and the same greedy tokens. `torchpaged coverage` made this page;
`--help` says how to run it again, and `torchpaged/testing/coverage/checks.py` what each check does.

- **paged**: attention reads the block pools. **latent**: it reads pools of latents, one row per token for all
  heads. **dense**: keys and values are gathered first, and SDPA attends.
- **no cache**: the model keeps no keys and values; it runs as without torchpaged.
- **refused**: an `UnsupportedModelError` names the reason. **wrong**: numbers differ and nothing said so.
  **broken**: another error.
- **graphs**: that a compiled decode takes, under `fullgraph=True`; a dash where it is not compiled, for the
  reason given.
"""


def versions() -> dict[str, str]:
    """What a table holds for: rows of other versions are not mixed into it."""
    return {"transformers": transformers.__version__, "torch": torch.__version__}


@dataclass
class Table:
    """Rows by architecture, of one pair of versions."""

    versions: dict[str, str] = field(default_factory=versions)
    rows: dict[str, Row] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Table:
        """The table in a file.

        Raises:
            ArgumentError: the file holds something else.
        """
        try:
            document: dict[str, Any] = json.loads(path.read_text())
            return cls(document["versions"], {row["model_type"]: Row(**row) for row in document["rows"]})
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                "output", "a JSON file that torchpaged coverage wrote", f"{path}: {error}"
            ) from None

    def save(self, path: Path) -> None:
        """Write the file anew, all at once: a run that is cut leaves the one before."""
        rows = [asdict(self.rows[name]) for name in sorted(self.rows)]
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        beside = path.with_name(path.name + ".new")
        beside.write_text(f'{{\n  "versions": {json.dumps(self.versions)},\n  "rows": [\n{lines}\n  ]\n}}\n')
        os.replace(beside, path)

    def counts(self) -> dict[str, int]:
        """How many rows there are of each mode, and "one graph"."""
        found = Counter(row.mode for row in self.rows.values())
        return {
            **{mode: found[mode] for mode in MODES},
            "one graph": sum(row.is_one_graph for row in self.rows.values()),
        }


def _cells(row: Row | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    uncompiled = "–" if row.mode in RUNS else ""
    return row.mode, str(row.graphs) if row.checks.get("compiled") == "right" else uncompiled


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
        tables: of different versions of transformers.
    """
    names = [
        f"transformers {table.versions['transformers']}, torch {table.versions['torch'].partition('+')[0]}"
        for table in tables
    ]
    lines = [
        _HEAD.format(tolerance=TOLERANCE),
        _line(["", "all", *MODES, "one graph"]),
        _line(["---"] + ["--:"] * (len(MODES) + 2)),
    ]
    for name, table in zip(names, tables, strict=True):
        lines.append(_line([name, len(table.rows), *table.counts().values()]))
    short = [table.versions["transformers"].rsplit(".", 1)[0] for table in tables]
    heads = [f"{head} {version}" for version in short for head in ("mode", "graphs")]
    lines += ["", _line(["architecture", "layers", *heads]), _line(["---"] * (2 + 2 * len(tables)))]
    for model_type in sorted({name for table in tables for name in table.rows}):
        rows = [table.rows.get(model_type) for table in tables]
        kind = next(row.kind for row in rows if row is not None)
        lines.append(_line([model_type, kind, *(cell for row in rows for cell in _cells(row))]))
    for name, table in zip(names, tables, strict=True):
        lines += ["", f"## Why not paged, or not compiled: {name}", "", *_reasons(table)]
    return "\n".join(lines) + "\n"
