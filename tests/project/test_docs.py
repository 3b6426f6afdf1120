"""The pages: their code runs, their links lead somewhere, their tables hold what the data says, their lines
can be read.

A fenced block of Python runs on the CPU, those of a page one after the other in one namespace. One whose
first line is a comment ``# needs ...`` (a GPU, a model's download) is compiled only. ``model`` is a small
random Llama, unless a page makes its own.
"""

import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from torchpaged.backends.choose import names

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
]
WIDTH = 110


class Block(NamedTuple):
    """``line``: of its first line of code in the page."""

    language: str
    line: int
    code: str

    @property
    def needs(self) -> str:
        """What keeps it from running here, in the page's own words."""
        match = re.match(r"# (needs .+)", self.code)
        return match[1] if match else ""


def blocks_of(text: str) -> list[Block]:
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    return [Block(match[1], text.count("\n", 0, match.start(2)) + 1, match[2]) for match in fences]


WITH_CODE = [
    page for page in PAGES if any(block.language == "python" for block in blocks_of(page.read_text()))
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_blocks_are_found() -> None:
    text = "a\n```python\nx = 1\n```\n\n```sh\nls\n```\n```python\n# needs a GPU\ny = x\n```\n"
    assert [(block.language, block.line, block.needs) for block in blocks_of(text)] == [
        ("python", 3, ""),
        ("sh", 7, ""),
        ("python", 10, "needs a GPU"),
    ]
    assert {"README.md", "docs/fusion.md", "docs/compile.md"} <= {name_of(page) for page in WITH_CODE}


def run_page(page: Path, space: dict[str, Any]) -> int:
    """Run the blocks of a page in ``space``; how many ran."""
    ran = 0
    for block in blocks_of(page.read_text()):
        if block.language == "python":
            # so that a traceback names the page's line
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            if not block.needs:
                exec(code, space)
                ran += 1
    return ran


@pytest.mark.slow_cases("docs/compile.md")
@pytest.mark.parametrize("page", [page for page in WITH_CODE if page.name != "README.md"], ids=name_of)
def test_code_runs(
    page: Path,
    make_llama: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if page.name == "backends.md":  # it asks for decode by a CPU's kernels
        request.getfixturevalue("native")
    monkeypatch.chdir(tmp_path)  # a page may write files
    monkeypatch.setattr(names, "REGISTERED", dict(names.REGISTERED))  # or register a backend
    model = make_llama(vocab_size=256, hidden_size=64, intermediate_size=128)
    assert run_page(page, {"__name__": "__page__", "model": model}), "nothing on this page ran"


def test_the_three_doors_of_the_readme() -> None:
    """With nothing given: they run one after the other, and give what the page says."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    space: dict[str, Any] = {"__name__": "__page__"}
    assert run_page(ROOT / "README.md", space) == 3
    assert space["tokens"].shape == (2, 32)
    assert space["out"].shape == (6, 8, 64)
    assert torch.isfinite(space["out"]).all()
    assert len(space["output"].token_ids) == 16
    assert space["generator"].fusion_report.complete


# ----------------------------------------------------------------------------------------------------- layout
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_can_be_read(page: Path) -> None:
    long = [
        f"{number}: {len(line)} columns"
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > WIDTH
    ]
    assert not long, long


def test_no_line_of_code_keeps_its_own_layout() -> None:
    """ruff lays out every line, also of code that would look better otherwise, and refuses a long one. The
    few marks that lift the width are for sources of another language or process, held in a string."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        ruff = tomllib.load(file)["tool"]["ruff"]
    assert ruff["line-length"] == WIDTH
    assert not {"E", "E5", "E501"} & set(ruff["lint"]["ignore"])
    ignored = [rule for rules in ruff["lint"]["per-file-ignores"].values() for rule in rules]
    assert not {"E", "E5", "E501"} & set(ignored)
    own, wide = [], []
    for folder in ("benchmarks", "custom_ops", "examples", "graphs", "tests", "torchpaged"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if re.search(r"#\s*(fmt|yapf):\s*(skip|off|disable)", line):
                    own.append(f"{name_of(path)}:{number}")
                if re.search(r"#\s*(ruff|flake8):\s*noqa|#\s*noqa(?!:)|#\s*noqa:[^#]*\bE501\b", line):
                    wide.append(f"{name_of(path)}:{number}")
    assert not own, own
    assert len(wide) <= 12, wide
    assert all(place.startswith("tests/") for place in wide), wide


def test_pages_are_short_enough() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    made = {"architectures.md", "backends.md", "stream_order.md"}  # a row for each model, backend or op
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.name in made or len(page.read_text().splitlines()) <= 200, page.name


def anchors_of(text: str) -> set[str]:
    """The anchors that a page's headings have, as GitHub makes them."""
    found: dict[str, int] = {}
    anchors = set()
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), re.M):
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        anchors.add(anchor if anchor not in found else f"{anchor}-{found[anchor]}")
        found[anchor] = found.get(anchor, 0) + 1
    return anchors


def links_of(text: str) -> list[str]:
    """Where a page's links lead, inline or by reference; a name in brackets without a definition is
    an error."""
    prose = re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M))
    definitions = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.M))
    used = {
        match[2] or match[1]
        for match in re.finditer(r"\[([^\[\]]+)\](?:\[([^\]]+)\])?(?![(:\[])", prose)
        if match[2] or match[1] in definitions
    }
    assert used <= set(definitions), f"no definition of {used - set(definitions)}"
    assert set(definitions) <= used | set(re.findall(r"\]\[([^\]]+)\]", text)), (
        f"not used: {set(definitions) - used}"
    )
    return [*re.findall(r"\]\(([^)\s]+)\)", prose), *definitions.values()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in links_of(page.read_text()):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors_of(path.read_text())):
            dead.append(link)
    assert not dead, dead


def test_dead_links_are_found() -> None:
    assert anchors_of("# A b, `c`: d\n## x\n## x\n") == {"a-b-c-d", "x", "x-1"}
    assert links_of("[a](b.md#c) and [d]\n\n[d]: e.py\n") == ["b.md#c", "e.py"]
    with pytest.raises(AssertionError, match="not used"):
        links_of("[d]: e.py\n")


def test_files_named_in_comments_exist() -> None:
    """Sources point to pages by their path."""
    missing = []
    for folder in ("custom_ops", "graphs", "torchpaged", "benchmarks", "examples", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cu", ".cuh", ".h", ".cpp", ".md") and "build" not in path.parts:
                named = re.findall(r"(?<![\w/.])docs/[\w/]+\.md", path.read_text())
                missing += [
                    (str(path.relative_to(ROOT)), name) for name in named if not (ROOT / name).exists()
                ]
    assert not missing, missing


# ------------------------------------------------------------------------------------------------ made tables
def test_tables_hold_what_the_data_says() -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "make_results.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\nrun: python benchmarks/make_results.py"


def test_every_document_is_used_and_every_loss_is_shown() -> None:
    pages = [ROOT / "docs" / "results.md", *sorted((ROOT / "docs" / "results").glob("*.md"))]
    text = "".join(page.read_text() for page in pages)
    everywhere = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert f"results/{path.name}" in everywhere or f"`{path.stem}`" in text, path.name
    results = ROOT / "benchmarks" / "results"
    made = dict(re.findall(r"<!-- made: (\w+) -->\n(.*?)<!-- end -->", text, re.S))
    assert len(made) >= 17
    assert all(table.strip() for table in made.values())
    for name in ("decode", "prefill"):
        lost = 0  # to the best paged peer, and to SDPA over contiguous keys
        for row in rows_of(sorted(results.glob(f"h200_suite_{name}*.json"))[-1].stem):
            us = {who: entry["us"] for who, entry in row["contenders"].items() if entry["status"] == "timed"}
            own, dense = min(us.pop("cuda"), us.pop("triton")), us.pop("sdpa", math.inf)
            lost += sum(round(peer / own, 2) < 1 for peer in (dense, min(us.values())))
        assert made[f"suite_{name}"].count(" lost |") == lost, name
    assert made["step"].count(" missed |") == sum(
        row["ms"] > (row["target_ms"] or row["ms"]) for row in rows_of("h200_step")
    )
    times = [row["tflops"] for row in rows_of("h200_prefill_kernel", "results") if row["part"] == "time"]
    slower = [name for name in ("native", "triton") if any(row[name] < 0.995 * row["fa3"] for row in times)]
    readme = (ROOT / "README.md").read_text()
    assert [
        name
        for name, row in (("native", "CUDA C++"), ("triton", "Triton"))
        if re.search(rf"\| prefill attention, {re.escape(row)}.* lost \|", readme)
    ] == slower


def rows_of(name: str, key: str = "rows") -> list[dict[str, Any]]:
    document: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return list(document[key])


def test_a_changed_figure_is_noticed(tmp_path: Path) -> None:
    """On a copy, with one figure changed by hand: --check says which page, a run puts it right."""
    for name in ("benchmarks", "docs", "tests/support"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "README.md", tmp_path)
    page, script = (
        tmp_path / "docs" / "results" / "decode.md",
        [sys.executable, str(tmp_path / "benchmarks" / "make_results.py")],
    )
    right = page.read_text()
    wrong = re.sub(r"\*\*(\d+\.\d)\*\*", r"**9\1**", right, count=1)
    assert wrong != right
    page.write_text(wrong)
    done = subprocess.run([*script, "--check"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "docs/results/decode.md" in done.stderr
    assert "README" not in done.stderr
    subprocess.run(script, check=True, capture_output=True)
    assert page.read_text() == right
