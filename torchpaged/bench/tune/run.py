"""One measurement of the usable backends on a device, and the file that the automatic choice reads.

document = tune(TuneOptions(device="cuda"))       # measures, and writes the file
plan(TuneOptions(device="cuda"))                  # says what would be measured
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchpaged.backends import Route, get_backend, list_backends
from torchpaged.backends.choose.tuned import Tuned, device_name, path_for, save, versions
from torchpaged.bench import conditions, timing
from torchpaged.bench.attention.case import free_memory, measure_case
from torchpaged.bench.attention.cases import AttentionCase, select_cases
from torchpaged.bench.attention.contender import own_backend
from torchpaged.bench.screen import Screen
from torchpaged.bench.tune import score
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError
from torchpaged.names import device_named

#: What is measured where nothing else is said: on a CPU the cases of a GPU take hours.
SUITES = {"cuda": ("decode", "mixed", "prefill"), "cpu": ("smoke",)}
#: Backends that are measured where they are named, by device type, and why.
_BY_NAME = {
    "cpu": {"flex": "each shape compiles for up to a minute on a CPU; name it"},
    "cuda": {},
}


@dataclass(frozen=True)
class TuneOptions:
    """What to measure.

    Attributes:
        device: "auto", "cpu", "cuda", "cuda:1".
        backends: names; none: all that can run on the device but the reference.
        suites: of `torchpaged.bench.attention.cases`; none: decode, mixed and prefill, on a CPU smoke.
        case: keep the cases whose name contains this.
        repeats: samples per backend and case at least.
        output: write the whole document to this file, after every case.
        save: write the file that the automatic choice reads.
        quiet: print nothing while it runs.
    """

    device: str = "auto"
    backends: Sequence[str] = ()
    suites: Sequence[str] = ()
    case: str = ""
    repeats: int = 12
    output: str = ""
    save: bool = True
    quiet: bool = False


def _cases(options: TuneOptions, device: torch.device) -> list[AttentionCase]:
    suites = options.suites or SUITES[device.type]
    chosen = select_cases(suites, options.case)
    # of a triple, the batch itself: its parts are in the other suites by their kind
    return [case for case in chosen if case.suite != "mixed" or case.num_decodes]


def _candidates(options: TuneOptions, device: torch.device) -> dict[str, str | None]:
    """Backends, and why one is not measured; None = it is.

    Raises:
        BackendUnavailableError: one that was named can't run here, or none can.
    """
    found: dict[str, str | None] = {}
    for name in options.backends or [name for name in list_backends() if name != "reference"]:
        backend = get_backend(name)
        reason = backend.unavailable()
        if not options.backends:
            reason = reason or _BY_NAME[device.type].get(name)
        if device.type not in backend.capabilities.device_types:
            reason = f"device {device.type} is not one of {', '.join(backend.capabilities.device_types)}"
        if reason and options.backends:
            raise BackendUnavailableError(f"backend {name!r} cannot be measured here: {reason}")
        found[backend.name] = reason
    if all(found.values()):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.items())
        raise BackendUnavailableError(f"no backend can be measured on {device}: {reasons}")
    return found


def plan(options: TuneOptions) -> dict[str, Any]:
    """What `tune` would do: ``device``, ``backends`` with reasons for those left out, ``cases``, ``file``.

    Raises:
        ArgumentError, BackendUnavailableError: an option names something unknown or unusable.
    """
    if options.repeats < 1:
        raise ArgumentError("repeats", "at least 1", str(options.repeats))
    device = device_named(options.device)
    return {
        "device": device_name(device),
        "backends": _candidates(options, device),
        "cases": [f"{case.suite}: {case.name}" for case in _cases(options, device)],
        "file": str(path_for(device)) if options.save else None,
    }


@torch.inference_mode()
def tune(options: TuneOptions) -> dict[str, Any]:
    """Measure, and write what the automatic choice reads.

    Every result is held to a float32 oracle first; a backend that is wrong or fails anywhere is left out of
    the orders, and ``unfit`` says why.

    Returns:
        The document: ``conditions``, ``rows``, ``unfit``, ``decode`` and ``prefill`` (the orders), ``losses``
        (of what the automatic choice would run, per case, against the best backend there), ``file``.

    Raises:
        ArgumentError, BackendUnavailableError: as `plan`; or nothing could be timed.
    """
    intended = plan(options)
    device = device_named(options.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    cases = _cases(options, device)
    names = [name for name, reason in intended["backends"].items() if reason is None]
    document: dict[str, Any] = {"benchmark": "tune", "conditions": conditions.collect(device)}
    document |= {"versions": versions(), "rows": [], "file": None}
    ceilings: dict[str, Any] = {
        "bytes_per_s": timing.measure_bandwidth(device)[0],
        "flop_per_s": timing.measure_flop_rate(device)[0],
    }
    free_memory(device)
    with Screen(len(cases) * (len(names) + 1), enabled=not options.quiet) as screen:

        def measure(case: AttentionCase, who: Sequence[str]) -> dict[str, Any]:
            everybody = [own_backend(name, shown=name) for name in who]
            row = measure_case(case, everybody, device, ceilings, options.repeats, step=screen.step)
            screen.row(row)
            return row

        for case in cases:
            document["rows"].append(measure(case, names))
            _write(options, document)
        rows = [row for row in document["rows"] if "skipped" not in row]
        document["unfit"] = score.unfit(rows)
        fit = [name for name in names if name not in document["unfit"]]
        route = _route(rows, fit)
        if route is not None:
            for case, row in zip(cases, document["rows"], strict=True):
                if "skipped" not in row and not case.is_decode:
                    of_route = measure(case, [route, *route_parts(route)])
                    row["contenders"] |= {route: of_route["contenders"][route]}
                    _write(options, document)
            document["unfit"] |= score.unfit(rows)
        decode, prefill = score.orders(rows, route if route not in document["unfit"] else None, fit)
        if not decode or not prefill:
            raise BackendUnavailableError("nothing could be timed: " + json.dumps(document["unfit"]))
        document |= {"decode": decode, "prefill": prefill, "losses": _losses(rows, decode[0], prefill[0])}
        if options.save:
            today = datetime.date.today().isoformat()
            found = Tuned(device_name(device), versions(), tuple(decode), tuple(prefill), today)
            document["file"] = str(save(found, device, {"us": _figures(rows), "losses": document["losses"]}))
            screen.say(f"written: {document['file']}")
        screen.say(f"decode: {', '.join(decode)}; prefill: {', '.join(prefill)}")
    _write(options, document)
    return document


def route_parts(route: str) -> tuple[str, str]:
    """The backends of a route's name."""
    from torchpaged.backends.choose.route import parse_route

    parts = parse_route(route)
    return parts.decode, parts.prefill


def _route(rows: Sequence[dict[str, Any]], fit: Sequence[str]) -> str | None:
    """The route of the best backends of both kinds of cases, if they differ."""
    best = [
        score.order([row for row in rows if score.is_decode(row) == decodes], fit)
        for decodes in (True, False)
    ]
    if not all(best) or best[0][0] == best[1][0]:
        return None
    return str(Route(best[0][0], best[1][0]))


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {row["case"]: {name: round(us, 2) for name, us in score.times(row).items()} for row in rows}


def _losses(rows: Sequence[dict[str, Any]], decode: str, prefill: str) -> dict[str, float | None]:
    """Per case, how far what would be chosen is from the best backend; None where it can't run the case."""
    other = str(Route(decode, prefill))
    found: dict[str, float | None] = {}
    for row in rows:
        timed = score.times(row)
        chosen = timed.get(decode if score.is_decode(row) else other)
        found[row["case"]] = round(chosen / min(timed.values()), 4) if chosen else None
    return found


def _write(options: TuneOptions, document: dict[str, Any]) -> None:
    if options.output:
        Path(options.output).write_text(json.dumps(document, indent=1) + "\n")
