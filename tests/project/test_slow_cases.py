"""Which cases ``slow_cases(but_every=n)`` leaves to a default run."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from command import script

VALUES = {"backend": ["one"], "batch": [*"abcd"], "size": [(1, 2), (3, 4), (5, 6)]}


def places(rows: list[dict[str, Any]], *given: Any) -> list[int]:
    """Of the cases with these parameters, by what each `parametrize` gives."""
    marks = [pytest.mark.parametrize(names, []).mark for names in given]
    cases = [
        SimpleNamespace(callspec=SimpleNamespace(params=row), iter_markers=lambda _: marks) for row in rows
    ]
    return list(script("tests/conftest.py")._places(cases))


@pytest.mark.parametrize(
    "given", [("size", "batch", "backend"), (["backend", "batch", "size"],), ("batch",)], ids=str
)
@pytest.mark.parametrize("every", [2, 3])
def test_each_value_of_a_matrix_stays(given: tuple[Any, ...], every: int) -> None:
    """Each parameter by itself, all by one `parametrize`, or by fixtures."""
    rows = [dict(zip(VALUES, row, strict=True)) for row in product(*VALUES.values())]
    kept = [row for row, place in zip(rows, places(rows, *given), strict=True) if place % every == 0]
    assert len(kept) <= len(rows) / every + 1
    for name, values in VALUES.items():
        assert {row[name] for row in kept} == set(values)


def test_values_given_together_are_one_parameter() -> None:
    pairs = [(72, 40), (1, 33), (8, 40)]
    rows = [{"keys": keys, "values": values} for keys, values in pairs]
    assert places(rows, "keys, values") == [0, 1, 2]
