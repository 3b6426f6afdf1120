"""The table of families names every kernel that its folders have."""

import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from torchpaged.custom_ops.families import FAMILIES, Family


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.folder)
def test_ops_of_cpu_files_are_registered(family: Family) -> None:
    """An op in ``cpu.py`` that the table does not name would run its reference in silence."""
    name = f"torchpaged.custom_ops.{family.folder}.cpu"
    found = find_spec(name)
    if found is None or not (found.origin or "").endswith("cpu.py"):  # a folder ``cpu`` has C++ alone
        assert not family.on_native
        return
    functions = inspect.getmembers(import_module(name), inspect.isfunction)
    ops = {op for op, function in functions if op in family.schemas and function.__module__ == name}
    assert ops == set(family.on_native)


def test_the_page_of_ops_says_what_runs_on_a_cpu() -> None:
    page = (Path(__file__).parents[2] / "docs/ops.md").read_text()
    told = dict(re.findall(r"^\| `(\w+)` \| .* \| (.+) \|$", page, re.MULTILINE))
    assert {op for op, words in told.items() if words == "yes"} == {op for f in FAMILIES for op in f.native}
    assert {op for op, words in told.items() if words == "reference"} == {
        op for f in FAMILIES for op in set(f.schemas) - {*f.native, *f.on_native}
    }
