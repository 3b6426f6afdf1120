"""What the rows of a run say together: ratios against the best peer, their geometric mean and worst case, and
what went wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torchpaged.bench.attention.cases import SUITES

#: Of contenders that take a mixed batch in two calls: measured, and not ranked.
SUFFIX = "-in-parts"


def compare(entries: dict[str, dict[str, Any]], own: Sequence[str]) -> dict[str, Any]:
    """The best own backend against the best peer, parts left out: ``ratio`` over 1 = own is faster."""
    timed = {
        name: entry["us"]
        for name, entry in entries.items()
        if entry["status"] == "timed" and not name.endswith(SUFFIX)
    }
    best_own = min((name for name in timed if name in own), key=timed.__getitem__, default=None)
    best_peer = min((name for name in timed if name not in own), key=timed.__getitem__, default=None)
    ratio = timed[best_peer] / timed[best_own] if best_own and best_peer else None
    return {"best_own": best_own, "best_peer": best_peer, "ratio": ratio}


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric mean and worst case of the ratios, per suite and over all, and what went wrong."""
    suites = {
        suite: [row for row in rows if row["suite"] == suite]
        for suite in dict.fromkeys(row["suite"] for row in rows)
    }
    result: dict[str, Any] = {
        "suites": {suite: _ratios(own) for suite, own in suites.items()},
        **_ratios(rows),
    }
    result["mixed_over_parts"] = _mixed_over_parts(rows)
    result["mixed_over_sequence"] = _mixed_over_sequence(rows)
    result["skipped"] = {row["case"]: row["skipped"] for row in rows if "skipped" in row}
    result["wrong_or_failed"] = [
        f"{row['case']}: {name} {entry['status']}: {entry['reason']}"
        for row in rows
        for name, entry in row["contenders"].items()
        if entry["status"] in ("wrong", "failed")
    ]
    return result


def _ratios(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    compared = [row for row in rows if row.get("ratio")]
    if not compared:
        return {"compared": 0, "geomean": None, "worst": None, "worst_case": None}
    worst = min(compared, key=lambda row: row["ratio"])
    geomean = math.exp(sum(math.log(row["ratio"]) for row in compared) / len(compared))
    return {
        "compared": len(compared),
        "geomean": geomean,
        "worst": worst["ratio"],
        "worst_case": worst["case"],
    }


def exit_code(document: dict[str, Any]) -> int:
    """1 if an own backend was wrong or failed, or nothing was timed; else 0: a peer's failure is reported,
    not ours to fix."""
    entries = [entry for row in document["rows"] for entry in row["contenders"].values()]
    own_fault = any(entry["own"] and entry["status"] in ("wrong", "failed") for entry in entries)
    return 1 if own_fault or not any(entry["status"] == "timed" for entry in entries) else 0


def _mixed_over_parts(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per mixed case and contender, its time over the summed times of its two parts (under 1 =
    mixing pays)."""
    ratios: dict[str, dict[str, float]] = {}
    cases = SUITES["mixed"]
    for first in range(0, len(cases), 3):
        found = [
            next((row for row in rows if row["case"] == case.name), None) for case in cases[first : first + 3]
        ]
        times = [
            {name: e["us"] for name, e in row["contenders"].items() if e["status"] == "timed"}
            for row in found
            if row
        ]
        if len(times) == 3:
            whole, *parts = times
            ratios[cases[first].name] = {
                name: us / sum(part[name] for part in parts)
                for name, us in whole.items()
                if all(name in part for part in parts)
            }
    return ratios


def _mixed_over_sequence(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per mixed case and own backend, its time over that of two calls one after the other."""
    ratios = {}
    for row in rows:
        times = {name: entry["us"] for name, entry in row["contenders"].items() if entry["status"] == "timed"}
        found = {name: us / times[name + SUFFIX] for name, us in times.items() if name + SUFFIX in times}
        if found:
            ratios[row["case"]] = found
    return ratios
