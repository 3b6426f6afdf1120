"""tests/slow.txt: which tests a default run leaves out."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


def load_conftest() -> Any:
    specification = importlib.util.spec_from_file_location(
        "conftest_of_tests", Path(__file__).with_name("conftest.py")
    )
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


slow_tests = load_conftest().slow_tests
NODES = ["tests/a.py::test_x[1-b]", "tests/a.py::test_x[2-b]", "tests/a.py::test_xy", "tests/b.py::test_x"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("# tests/a.py::test_x\n\n", []),
        ("tests/a.py::test_x", [0, 1]),
        ("tests/a.py::test_x[2-b]", [1]),
        ("tests/a.py::test_x[*b]\n  !tests/a.py::test_x[1-*", [1]),
        ("!tests/a.py::test_x\ntests/a.py::test_x", [0, 1]),
        ("tests/a.py::*", [0, 1, 2]),
    ],
)
def test_last_match_counts(text: str, expected: list[int]) -> None:
    assert slow_tests(text, NODES, strict=True) == {NODES[i] for i in expected}


@pytest.mark.parametrize("line", ["tests/a.py::test_z", "tests/a.py::test_z[1]", "!tests/b.py::test_xy"])
def test_a_test_that_is_not_there_is_refused(line: str) -> None:
    with pytest.raises(pytest.UsageError, match="not there"):
        slow_tests(line, NODES, strict=True)
    assert slow_tests(line, NODES) == set(), "a part of a file says nothing about the rest of it"


def test_files_that_were_not_collected_are_left_alone() -> None:
    assert slow_tests("tests/c.py::test_z", NODES, strict=True) == set()
