"""The documentation site: every public name has a page, every page has a place, messages that the
troubleshooting page quotes exist, and the site builds without a warning."""

import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest
from command import ROOT, printed
from site_links import broken_links

from torchpaged.backends import Capabilities

DOCS = ROOT / "docs"
MODULES = sorted((DOCS / "reference").glob("torchpaged*.rst"))


def listed(page: Path) -> set[str]:
    """The names of a reference page: those with a page of their own, and those that have it elsewhere."""
    text = page.read_text()
    return {*re.findall(r"^   (\w+)$", text, re.M), *re.findall(r":py:obj:`(\w+) <", text)}


@pytest.mark.parametrize("page", MODULES, ids=lambda page: page.stem)
def test_every_public_name_has_a_page(page: Path) -> None:
    if page.stem == "torchpaged.hf":
        pytest.importorskip("transformers", reason="transformers is not installed")
    assert listed(page) == set(importlib.import_module(page.stem).__all__)


def test_every_public_module_has_a_page() -> None:
    inits = [path for path in (ROOT / "torchpaged").glob("*/__init__.py") if "__all__" in path.read_text()]
    modules = {f"torchpaged.{path.parent.name}" for path in inits} | {"torchpaged"}
    modules -= {"torchpaged.functional"}  # all of it is in torchpaged
    assert modules == {page.stem for page in MODULES}


def test_every_page_has_a_place() -> None:
    index = (DOCS / "index.md").read_text()
    files = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in files} - {"index"}
    hidden = {page for page in pages if page.startswith("log/")}  # listed by log/README
    assert pages - hidden <= set(re.findall(r"^([\w/.-]+)$", index, re.M))


def test_quoted_messages_exist() -> None:
    page = (DOCS / "howto/troubleshooting.md").read_text()
    quoted = re.findall(r"^## `(.+)`$", page, re.M)
    rooms = [ROOT / "custom_ops", ROOT / "graphs", ROOT / "torchpaged"]
    source = "".join(path.read_text() for room in rooms for path in room.rglob("*.py"))
    assert len(quoted) >= 24
    for message in quoted:
        assert message in re.sub(r'"\s+f?"', "", source), message


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("furo", reason="pip install 'torchpaged[docs]'")
    pytest.importorskip("transformers", reason="transformers is not installed")
    printed("-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(tmp_path), timeout=500)
    page = (tmp_path / "reference/api/torchpaged.PagedAttention.html").read_text()
    assert 'id="torchpaged.PagedAttention.forward"' in page
    page = (tmp_path / "reference/api/torchpaged.engine.Generator.html").read_text()
    for method in ("generate", "submit", "stream", "cancel", "pin", "snapshot", "metrics", "close"):
        assert f'id="torchpaged.engine.Generator.{method}"' in page, method  # of its bases
        assert f'title="torchpaged.engine.Generator.{method}"' in page, method  # in the table
    assert "ADVICE" not in page
    assert "KeptPrefixes" not in page  # a base that no user imports
    page = (tmp_path / "reference/api/torchpaged.backends.Capabilities.html").read_text()
    assert all(f"<strong>{field.name}</strong>" in page for field in fields(Capabilities))
    assert not broken_links(tmp_path)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.html").write_text('<a href="b.html#x"></a><a href="b.html#y"></a><img src="c.png">')
    (tmp_path / "b.html").write_text(
        '<p id="x"><a href="#x"></a><a href="folder"></a><a href="https://d"></a>'
    )
    assert sorted(broken_links(tmp_path)) == ["a.html: b.html#y", "a.html: c.png", "b.html: folder"]
