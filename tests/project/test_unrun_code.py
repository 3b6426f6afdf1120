"""Names exist that code which CI does not run takes from torchpaged: GPU tests, their workers, benchmarks.
One of these called a function that had moved, and nothing said so until a GPU ran it."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "tests/gpu").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
FOLDERS = ("tests/gpu", "tests/support", "benchmarks")


def is_there(module: str, name: str) -> bool:
    """Whether ``from module import name`` of torchpaged, or of a file that several share, finds it."""
    for folder in FOLDERS:
        path = ROOT / folder / Path(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return name in names_of(ast.parse(file.read_text())) or (path / f"{name}.py").exists()
    if module.split(".")[0] != "torchpaged":
        return True
    found: Any = importlib.import_module(module)
    try:
        return hasattr(found, name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


def names_of(tree: ast.Module) -> set[str]:
    """That a file defines or imports at its top, whatever branch it stands in."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def absent(source: str) -> list[str]:
    """What a file imports, or takes as ``torchpaged.name``, and is not there."""
    found = list[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{a.name}" for a in node.names if not is_there(node.module, a.name)]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torchpaged":
            found += [] if is_there("torchpaged", node.attr) else [f"torchpaged.{node.attr}"]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_exist(path: Path) -> None:
    assert not absent(path.read_text())


def test_absent_names_are_seen() -> None:
    assert absent("import torchpaged\ntorchpaged.cascade_attention()") == ["torchpaged.cascade_attention"]
    assert absent("from torchpaged.cache import PagedCash") == ["torchpaged.cache.PagedCash"]
    assert absent("from library_backends import attend, step_of") == ["library_backends.step_of"]
    assert not absent("from torchpaged import hf\nfrom torchpaged.hf import PagedCache")
