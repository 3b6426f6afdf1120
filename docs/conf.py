"""The site: ``sphinx-build -W docs build/site``. Needs ``pip install ".[docs]"`` and the package's own
extras; no network."""

from __future__ import annotations

import json
import re
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

import torchpaged

DOCS = Path(__file__).parent
project = "torchpaged"
copyright = "the torchpaged authors"
release = version = torchpaged.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
# autosummary writes its pages with the first of them
source_suffix = {".rst": "restructuredtext", ".md": "markdown", ".ipynb": "markdown"}
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
napoleon_use_ivar = True
default_role = "py:obj"  # `name` in docstrings
autodoc_typehints = "signature"
python_maximum_signature_line_length = 90
autodoc_member_order = "bysource"
#: Bases whose members stand in their own documentation.
FOREIGN_BASES = (torch.nn.Module, Protocol, Enum, int, str, Exception, tuple, dict, object)
FOREIGN = ",".join(["NamedTuple", *(base.__name__ for base in FOREIGN_BASES)])
autodoc_default_options = {"members": True, "show-inheritance": True, "inherited-members": FOREIGN}
#: Their names, for the tables of methods (templates/autosummary/class.rst).
autosummary_context = {"foreign": sorted({name for base in FOREIGN_BASES for name in dir(base)})}
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "static/scorer.js")
html_title = f"torchpaged {release}"
templates_path = ["templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
suppress_warnings = ["ref.python"]  # words that are attributes of several classes, such as `session`
PUBLIC = sorted(page.stem for page in (DOCS / "reference").glob("torchpaged*.rst"))


def to_restructured_text(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written for a terminal: code stands indented behind an empty line, without a mark.

    A table in a module has no docstring of its own; ``dict``'s would stand in its place.
    """
    if what == "data" and type(value).__module__ == "builtins":
        lines[:] = [f"A {type(value).__name__}."]
    marked: list[str] = []
    for line in lines:
        before = marked[-2:]
        if (
            line.startswith("    ")
            and before[-1:] == [""]
            and len(before) == 2
            and before[0][:1].strip()
            and before[0][-2:] != "::"
        ):
            marked += ["::", ""]
        marked.append(line)
    lines[:] = marked


def notebook_as_markdown(app: Any, page: str, source: list[str]) -> None:
    """Cells of a notebook as a page: text as it is, code and what it printed as blocks."""
    if not page.startswith("notebooks/"):
        return
    parts = []
    for cell in json.loads(source[0])["cells"]:
        text = "".join(cell["source"])
        printed = "".join(line for output in cell.get("outputs", ()) for line in output["text"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [f"```text\n{printed}```"] if printed else []
    source[0] = "\n\n".join(parts)


def links_out_of_the_site(app: Any, page: str, source: list[str]) -> None:
    """Pages elsewhere in the checkout become downloads, as other files are; folders are named."""

    def instead(match: re.Match[str]) -> str:
        text, path = match.groups()
        target = (DOCS / page).parent.joinpath(path).resolve()
        if target.is_relative_to(DOCS) or not target.exists():
            return match[0]
        if target.is_dir():
            name = f"`{target.relative_to(DOCS.parent)}`"
            return name if text.strip("`") in name else f"{text} ({name})"
        return f"[{text}](<path:{path}>)" if target.suffix == ".md" else match[0]

    source[0] = re.sub(r"\[([^][]+)\]\((\.\./[^)#\s]+)\)", instead, source[0])


def public_bases(app: Any, name: str, value: Any, options: Any, bases: list[Any]) -> None:
    """Bases that no user imports are not named: their methods stand on the page of the class."""
    named = [base for base in bases if getattr(base, "__module__", "").partition(".")[0] != "torchpaged"]
    public = {
        each for module in PUBLIC for each in vars(import_module(module)).values() if isinstance(each, type)
    }
    bases[:] = [base for base in bases if base in named or base in public] or [object]


def setup(app: Any) -> None:
    """What Sphinx calls."""
    app.connect("source-read", notebook_as_markdown)
    app.connect("source-read", links_out_of_the_site)
    app.connect("autodoc-process-bases", public_bases)
    app.connect("autodoc-process-docstring", to_restructured_text, priority=100)  # ahead of napoleon
