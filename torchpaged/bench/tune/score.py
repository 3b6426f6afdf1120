"""Orders of backends, of the rows of a measurement: each case counts by how far a backend is from the best
one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

#: By how much a route must beat the best single backend: each part's session costs memory and plans.
ROUTE_GAIN = 1.02


def times(row: dict[str, Any]) -> dict[str, float]:
    """Microseconds per call of each backend that was timed in this case, its share of a plan included."""
    return {
        name: entry["us_with_plan"] for name, entry in row["contenders"].items() if entry["status"] == "timed"
    }


def unfit(rows: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Backends that gave a wrong result or failed in any case, and the first such: not to be chosen."""
    found: dict[str, str] = {}
    for row in rows:
        for name, entry in row["contenders"].items():
            if entry["status"] in ("wrong", "failed"):
                found.setdefault(name, f"{row['case']}: {entry['status']}: {entry['reason']}")
    return found


def losses(rows: Sequence[dict[str, Any]], among: Iterable[str]) -> dict[str, dict[str, float]]:
    """Per backend and case, its time over that of the best one of ``among``; 1 = it is the best."""
    names = list(among)
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        timed = {name: us for name, us in times(row).items() if name in names}
        for name, us in timed.items():
            found.setdefault(name, {})[row["case"]] = us / min(timed.values())
    return found


def geomean(values: Iterable[float]) -> float:
    """Of at least one number above 0."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def order(rows: Sequence[dict[str, Any]], among: Iterable[str]) -> list[str]:
    """Backends by the geometric mean of their `losses`, the best first. Cases that one can't run don't count
    for it: it is not chosen for them."""
    scores = {name: geomean(ratios.values()) for name, ratios in losses(rows, among).items()}
    return sorted(scores, key=scores.__getitem__)


def is_decode(row: dict[str, Any]) -> bool:
    """Whether every request of the case has one query token."""
    return bool(row["num_tokens"] == row["num_reqs"])


def orders(
    rows: Sequence[dict[str, Any]], route: str | None, among: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The order for decodes and the order for everything else. They begin with different backends only if the
    ``route`` of the two was timed and is better over all kinds of cases than the best single backend.

    Args:
        rows: of the measurement.
        route: name of the route of the best backends of both kinds, if they differ.
        among: single backends that may be chosen.
    """
    kinds = [row for row in rows if is_decode(row)], [row for row in rows if not is_decode(row)]
    decode, prefill = (order(kind, among) for kind in kinds)
    if not decode or not prefill:
        return (decode or prefill), (prefill or decode)
    if decode[0] == prefill[0]:
        return decode, prefill
    whole = [name for name in order(rows, among) if name in decode and name in prefill]
    if route is not None and whole:
        one = _overall(kinds, (whole[0], whole[0]), [*among, route])
        both = _overall(kinds, (decode[0], route), [*among, route])
        if both is not None and (one is None or one / both >= ROUTE_GAIN):
            return decode, prefill
    best = whole[0] if whole else prefill[0]
    return [best, *(n for n in decode if n != best)], [best, *(n for n in prefill if n != best)]


def _overall(
    kinds: tuple[list[dict[str, Any]], list[dict[str, Any]]], names: tuple[str, str], among: Sequence[str]
) -> float | None:
    """How far a backend per kind of case is from the best, both kinds alike; None if one was not timed."""
    means = []
    for rows, name in zip(kinds, names, strict=True):
        ratios = losses(rows, among).get(name)
        if not ratios or len(ratios) < len(rows):
            return None
        means.append(geomean(ratios.values()))
    return geomean(means)
