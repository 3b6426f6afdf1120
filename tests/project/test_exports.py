"""Exported names are those that pages and docstrings speak of: ``__all__`` of a package is what is public."""

import ast
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PACKAGES = sorted(
    {
        path.resolve()
        for folder in ("torchpaged", "custom_ops", "graphs")
        for path in (ROOT / folder).rglob("*.py")
        if "\n__all__ = " in path.read_text()
    }
)


def named_in_pages() -> set[str]:
    """Words of code in pages, and of the examples."""
    pages = "\n".join(page.read_text() for page in PAGES)
    code = re.findall(r"```.*?```|`[^`\n]+`", pages, re.DOTALL)
    return set(re.findall(r"\w+", "\n".join([*code, *(path.read_text() for path in EXAMPLES)])))


def exported(source: str) -> list[str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def undocumented(source: str, pages: set[str]) -> list[str]:
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return sorted(set(exported(source)) - pages - set(re.findall(r"\w+", docstring)))


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_exported_name_is_documented(path: Path) -> None:
    modules = {other.stem for other in path.parent.glob("*.py")}  # a package that lists its modules
    missing = set(undocumented(path.read_text(), named_in_pages())) - modules
    assert not missing, f"name them in docs/ or the package's docstring, or don't export them: {missing}"


def test_few_names_are_exported() -> None:
    count = sum(len(exported(path.read_text())) for path in PACKAGES)
    assert 100 < count <= 180, count


def test_an_undocumented_name_is_found() -> None:
    source = '"""Holds `known`."""\n\n__all__ = ["known", "of_a_page", "unknown"]\n'
    assert undocumented(source, {"of_a_page"}) == ["unknown"]


# ------------------------------------------------------------------------------------ options in running text
CALL = re.compile(r"`(Generator|\w*Paged\w+|\w*GraphRunner|SamplingParams)\(([^`]*)\)`")


def options_of_calls(text: str) -> list[tuple[str, str]]:
    """Classes, and options that calls of them in running text give, such as ``Generator(fuse=True)``."""
    return [(name, option) for name, given in CALL.findall(text) for option in re.findall(r"(\w+)=", given)]


def test_options_that_pages_name_exist() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    import torchpaged.engine
    import torchpaged.graphs
    import torchpaged.hf

    homes = (torchpaged, torchpaged.hf, torchpaged.engine, torchpaged.graphs)
    found = [pair for page in PAGES for pair in options_of_calls(page.read_text())]
    assert len(found) >= 20
    for name, option in found:
        home = next(module for module in homes if hasattr(module, name))
        known = inspect.signature(getattr(home, name).__init__).parameters
        takes_more = any(one.kind is one.VAR_KEYWORD for one in known.values())
        assert option in known or takes_more, f"{name}({option}=)"


def test_an_option_in_running_text_is_found() -> None:
    assert options_of_calls("`PagedCache(..., a=1, b=)` and `f(c=2)`") == [
        ("PagedCache", "a"),
        ("PagedCache", "b"),
    ]
