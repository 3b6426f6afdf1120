"""Tables of the suites: which peer counts, and when a case is void."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("result_tables", "suite_tables"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("suite_tables", FOLDER / "suite_tables.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(**us: float | str) -> dict[str, Any]:
    """A number: timed; a text: failed for that reason; "-": unsupported."""
    entries: dict[str, Any] = {}
    for name, value in us.items():
        entry: dict[str, Any] = {"status": "timed", "us": value}
        if isinstance(value, str):
            entry = {"status": "unsupported" if value == "-" else "failed", "reason": value}
        entries[name.replace("_", "-")] = entry
    return {"case": "32/8/128 one b16", "contenders": entries}


def test_the_fastest_way_of_a_peer_counts(tables: Any) -> None:
    case = row(
        cuda=10.0, triton=12.0, fa3=14.0, flashinfer=30.0, flashinfer_no_graph=13.0, flashinfer_fa3="-"
    )
    assert tables.ratios(case) == (1.3, None)
    assert not tables.void(case)
    assert tables.ratios(row(cuda=12.0, triton=10.0, fa3=9.0, sdpa=8.0)) == (0.9, 0.8)


def test_a_failure_of_all_ways_makes_the_case_void(tables: Any) -> None:
    """And of one way alone it does not; nor does what a peer does not support."""
    reason = "no memory " + "of the kind that it asks for " * 4 + "at all"
    failed = row(cuda=10.0, triton=12.0, fa3=14.0, flashinfer=f"{reason}. Ask", flashinfer_fa3="-", sdpa=11.0)
    assert tables.ratios(failed) == (None, 1.1)
    one_way = row(cuda=10.0, triton=12.0, fa3=14.0, flashinfer="no memory", flashinfer_fa3=13.0)
    assert tables.ratios(one_way)[0] == 1.3
    unsupported = row(cuda=10.0, triton=12.0, fa3=14.0, flashinfer="-", flashinfer_fa3="-")
    assert tables.ratios(unsupported)[0] == 1.4
    text = " ".join(tables.mean([failed, one_way]))
    assert "over 1 cases: **1.30**" in text
    assert f"one is void: FlashInfer: {reason}." in text


def test_a_void_case_is_in_no_count(tables: Any) -> None:
    """Neither in the means nor in the number of cases that the README's line says."""
    good, void = row(cuda=10.0, triton=12.0, fa3=14.0), row(cuda=10.0, triton=12.0, flashinfer="no memory")
    assert tables.summary_line("prompts", "FA3", [good, void]) == ["prompts, 1 cases", "FA3", "1.40", "1.40"]
