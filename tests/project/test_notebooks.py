"""The notebooks: their cells run, and print what is stored of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import script

from torchpaged.custom_ops import native_status

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.fixture(scope="module")
def runner() -> Any:
    return script("docs/notebooks/run.py")


def test_there_are_three() -> None:
    assert [path.stem for path in PATHS] == ["engine", "huggingface", "module"]


def test_a_cell_gives_what_it_prints_and_its_last_value(runner: Any) -> None:
    space: dict[str, Any] = {}
    assert runner.run_cell("x = 2\nprint(x)\nx + 1", "cell", space) == "2\n3\n"
    assert runner.run_cell("None", "cell", space) == ""
    assert space["x"] == 2


@pytest.mark.slow
@pytest.mark.skipif(not native_status()[0], reason="outputs name the native CPU kernels")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_cells_print_what_is_stored(path: Path, runner: Any) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for cell, text in runner.run_notebook(path):
        assert text == runner.stored(cell), "".join(cell["source"])


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_nothing_of_a_machine_is_stored(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert "/home/" not in path.read_text()
    assert "/root/" not in path.read_text()
    lines = [line.rstrip("\n") for cell in notebook["cells"] for line in cell["source"]]
    assert max(map(len, lines)) <= 110
