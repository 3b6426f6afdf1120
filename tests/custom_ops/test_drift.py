"""Long runs of linear_attention on a CPU: errors stay within those of a plain recurrence of the same dtype.
benchmarks/bench_drift.py is the measure, on GPUs too."""

from typing import Any

import pytest
import torch
from bench_drift import FAMILIES, measure, small


def errors_of(name: str, count: int, reference: bool) -> dict[tuple[str, str], dict[int, float]]:
    with torch.inference_mode():
        rows: list[dict[str, Any]] = measure(name, small(FAMILIES[name]), count, "cpu", reference)
    return {(row["case"], row["way"]): row["errors"] for row in rows}


@pytest.mark.parametrize("name", FAMILIES)
def test_decodes_are_the_recurrence(name: str) -> None:
    """By the op's reference, whose rounding is that of the plain recurrence, but for the order of sums."""
    found = errors_of(name, 500, reference=True)
    for case in ("float32", "states of bfloat16"):
        want, got = found[case, "recurrence"], found[case, "decode"]
        assert got[500] <= 1.2 * want[500]
        assert got[500] >= want[500] / 1.2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens"), [("gdn", 10_000), *((name, 100_000) for name in FAMILIES)])
def test_long_runs_do_not_drift(name: str, tokens: int) -> None:
    """In prompts of 500 and one by one; the shorter run is the gate's."""
    found = errors_of(name, tokens, reference=False)
    for case, of_reference in (
        ("float32", "float32"),
        ("states of float32", "float32"),
        ("states of bfloat16", "states of bfloat16"),
    ):
        for way in ("prompts", "decode"):
            for at, error in found[case, way].items():
                assert error <= 1.5 * found[of_reference, "recurrence"][at], (case, way, at)
