"""One run of the attention benchmark (needs torch only).

    document = run(Options(suite=["decode"]))

For every case: inputs on the device, each contender checked against the float32 oracle, those that pass timed
in turns. A contender that can't run, is wrong or fails is reported as that and never left out. ``document``
holds the conditions, one row per case and a summary; what a reader sees meanwhile goes to stderr.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import conditions, timing

from attention_peers.case import free_memory, measure_case
from attention_peers.cases import AttentionCase, select_cases
from attention_peers.contender import Contender
from attention_peers.options import Options
from attention_peers.random_cases import random_cases
from attention_peers.suites import SUITES
from attention_peers.summary import PeerScreen, summarise
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.names import device_named, short_dtype

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cases_of(options: Options) -> list[AttentionCase]:
    """The cases that the options name.

    Raises:
        ArgumentError: a suite or dtype is unknown, or no case is left.
    """
    dtype = short_dtype(options.dtype)
    if dtype and dtype not in DTYPES:
        raise ArgumentError("dtype", f"one of {', '.join(DTYPES)}", repr(options.dtype))
    suites, known = options.suite or ("decode",), SUITES
    if options.random:
        suites, known = ("random",), {"random": tuple(random_cases(options.seed, options.random))}
    return select_cases(suites, options.case, DTYPES.get(dtype), known)


@torch.inference_mode()
def run(options: Options, cases: Sequence[AttentionCase], contenders: Sequence[Contender]) -> dict[str, Any]:
    """Run the benchmark and return its document: ``conditions``, ``ceilings``, ``rows``, ``summary``.

    Args:
        options: what to run.
        cases: those that the options name.
        contenders: what is measured.

    Raises:
        ArgumentError, BackendUnavailableError: an option names something unknown; nothing has run then.
    """
    if options.repeats < 1:
        raise ArgumentError("repeats", "at least 1", str(options.repeats))
    device = device_named(options.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams, graphs and events below are the current device's
    document: dict[str, Any] = {
        "benchmark": "attention",
        "conditions": conditions.collect(device),
        "ceilings": _ceilings(options, device),
        "rows": [],
    }

    def write() -> None:
        if options.output:
            Path(options.output).write_text(json.dumps(document, indent=1) + "\n")

    free_memory(device)
    ceilings, layout = document["ceilings"], options.heads_first
    with PeerScreen(len(cases) * len(contenders), enabled=not options.json_only) as shown:
        for case in cases:
            row = measure_case(case, contenders, device, ceilings, options.repeats, layout, shown.step)
            document["rows"].append(row)
            shown.row(row)
            document["summary"] = summarise(document["rows"])
            write()  # after every case: an interrupted run keeps what it has
    if device.type == "cuda":
        document["conditions"]["gpu_state_after"] = conditions.gpu_state(device)
    shown.finish(document)
    write()
    return document


def exit_code(document: dict[str, Any]) -> int:
    """1 if an own backend was wrong or failed, or nothing was timed; else 0: a peer's failure is reported,
    not ours to fix."""
    entries = [entry for row in document["rows"] for entry in row["contenders"].values()]
    own_fault = any(entry["own"] and entry["status"] in ("wrong", "failed") for entry in entries)
    return 1 if own_fault or not any(entry["status"] == "timed" for entry in entries) else 0


def _ceilings(options: Options, device: torch.device) -> dict[str, Any]:
    asked = {
        "bytes_per_s": (options.bandwidth, timing.measure_bandwidth),
        "flop_per_s": (options.flop_rate, timing.measure_flop_rate),
    }
    ceilings: dict[str, Any] = {}
    for name, (tera, measure) in asked.items():
        value, how = (tera * 1e12, "given") if tera else measure(device)
        ceilings |= {name: value, f"{name}_from": how}
    return ceilings
