"""What rows say about peers: ratios of the best peer over the best own backend, their geometric mean and
worst case, mixed batches against their parts; and the table with them."""

import math
from collections.abc import Sequence
from typing import Any

from measuring.screen import Screen, notes, table

from attention_peers.suites import SUITES

#: Of contenders that take a mixed batch in two calls: measured, and not ranked.
SUFFIX = "-in-parts"


def faults(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was skipped, wrong or failed, and why."""
    return {
        "skipped": {row["case"]: row["skipped"] for row in rows if "skipped" in row},
        "wrong_or_failed": [
            f"{row['case']}: {name} {entry['status']}: {entry['reason']}"
            for row in rows
            for name, entry in row["contenders"].items()
            if entry["status"] in ("wrong", "failed")
        ],
    }


def compare(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The best own backend against the best peer, parts left out: ``ratio`` over 1 = own is faster."""
    timed = {
        name: entry["us"]
        for name, entry in entries.items()
        if entry["status"] == "timed" and not name.endswith(SUFFIX)
    }
    best_own = min((name for name in timed if entries[name]["own"]), key=timed.__getitem__, default=None)
    best_peer = min((name for name in timed if not entries[name]["own"]), key=timed.__getitem__, default=None)
    ratio = timed[best_peer] / timed[best_own] if best_own and best_peer else None
    return {"best_own": best_own, "best_peer": best_peer, "ratio": ratio}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric mean and worst case of the ratios, per suite and over all, and what went wrong. Each row gets
    what `compare` says."""
    for row in rows:
        if "skipped" not in row:
            row |= compare(row["contenders"])
    suites = {
        suite: [row for row in rows if row["suite"] == suite] for suite in {r["suite"]: 0 for r in rows}
    }
    return {
        "suites": {suite: _ratios(own) for suite, own in suites.items()},
        **_ratios(rows),
        "mixed_over_parts": _mixed_over_parts(rows),
        "mixed_over_sequence": _mixed_over_sequence(rows),
        **faults(rows),
    }


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


def _mixed_over_parts(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per mixed case and contender, its time over the summed times of its two parts (under 1 =
    the mixed batch is faster)."""
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


class PeerScreen(Screen):
    """`Screen`, with ratios where a peer was asked for."""

    def finish(self, document: dict[str, Any]) -> None:
        """The table, its notes, and what `summarise` found."""
        rows = document["rows"]
        header, lines = table(rows)
        has_peers = any(not entry["own"] for row in rows for entry in row["contenders"].values())
        if has_peers:
            header.append("peer/own")
            for line, row in zip(lines, rows, strict=True):
                line.append(f"{row['ratio']:.2f}" if row.get("ratio") else "-")
        self.table("microseconds per call, median (rate)", header, lines)
        for text in (*notes(document), *_mixed_notes(document["summary"])):
            self.say(text)
        for text in _ratio_notes(document["summary"]) if has_peers else ():
            self.say(text)


def _mixed_notes(summary: dict[str, Any]) -> list[str]:
    return [
        f"{case}, of {what}: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
        for figure, what in (
            ("mixed_over_parts", "its two parts alone, added up"),
            ("mixed_over_sequence", "two calls one after the other"),
        )
        for case, ratios in summary[figure].items()
    ]


def _ratio_notes(summary: dict[str, Any]) -> list[str]:
    suites = summary["suites"]
    return [
        f"{suite}: best peer / own: geomean {figures['geomean']:.2f} over {figures['compared']} cases, "
        f"worst {figures['worst']:.2f} ({figures['worst_case']})"
        if figures["compared"]
        else f"{suite}: no case with both an own backend and a peer"
        for suite, figures in {**suites, **({"all": summary} if len(suites) > 1 else {})}.items()
    ]
