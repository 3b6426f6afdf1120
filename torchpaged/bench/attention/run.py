"""One run of the attention benchmark (needs torch only).

    document = run(Options(suites=("decode",)))

For every case: inputs on the device, each contender checked against the float32 oracle, those that pass timed
in turns. A contender that can't run, is wrong or fails is reported as that and never left out. ``document``
holds the conditions, one row per case and a summary; what a reader sees meanwhile goes to stderr.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchpaged.bench import conditions, timing
from torchpaged.bench.attention.case import free_memory, measure_case
from torchpaged.bench.attention.cases import AttentionCase, select_cases
from torchpaged.bench.attention.contender import Contender, own_backends
from torchpaged.bench.attention.summary import summarise
from torchpaged.bench.screen import Screen
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.names import device_named, short_dtype

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        suites: names in ``cases.SUITES``; "all" = every suite but smoke.
        case: keep the cases whose name contains this.
        backends: own backends by name; None = those made for the device's type, without the reference.
        device: "auto", "cpu", "cuda", "cuda:1".
        dtype: fp32, bf16, fp16 for queries and caches (fp8 caches stay fp8); "" = the case's own.
        heads_first: lay the caches out as ``[num_blocks, num_kv_heads, block_size, head_dim]`` instead of
            tokens first.
        repeats: samples per contender at least, each a round over all layers' caches.
        bandwidth: memory ceiling in TB/s; None = measured.
        flop_rate: compute ceiling in TFLOP/s; None = measured.
        output: write the document here, after every case.
        json_only: print nothing but the JSON line.
    """

    suites: Sequence[str] = ("decode",)
    case: str = ""
    backends: Sequence[str] | None = None
    device: str = "auto"
    dtype: str = ""
    heads_first: bool = False
    repeats: int = 24
    bandwidth: float | None = None
    flop_rate: float | None = None
    output: str = ""
    json_only: bool = False


def cases_of(options: Options) -> list[AttentionCase]:
    """The cases that the options name.

    Raises:
        ArgumentError: a suite or dtype is unknown, or no case is left.
    """
    dtype = short_dtype(options.dtype)
    if dtype and dtype not in DTYPES:
        raise ArgumentError("dtype", f"one of {', '.join(DTYPES)}", repr(options.dtype))
    return select_cases(options.suites, options.case, DTYPES.get(dtype))


@torch.inference_mode()
def run(options: Options, everybody: Sequence[Contender] | None = None) -> dict[str, Any]:
    """Run the benchmark and return its document: ``conditions``, ``ceilings``, ``rows``, ``summary``.

    Args:
        options: what to run.
        everybody: who is measured; None = ``options.backends``.

    Raises:
        ArgumentError, BackendUnavailableError: an option names something unknown; nothing has run then.
    """
    if options.repeats < 1:
        raise ArgumentError("repeats", "at least 1", str(options.repeats))
    cases = cases_of(options)
    device = device_named(options.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams, graphs and events below are the current device's
    if everybody is None:
        everybody = own_backends(device, options.backends)
    document: dict[str, Any] = {
        "benchmark": "attention",
        "conditions": conditions.collect(device),
        "ceilings": _ceilings(options, device),
    }
    document["rows"] = []
    free_memory(device)
    with Screen(len(cases) * len(everybody), enabled=not options.json_only) as screen:
        for case in cases:
            document["rows"].append(
                measure_case(
                    case,
                    everybody,
                    device,
                    document["ceilings"],
                    options.repeats,
                    options.heads_first,
                    screen.step,
                )
            )
            screen.row(document["rows"][-1])
            document["summary"] = summarise(document["rows"])
            if options.output:  # after every case: an interrupted run keeps what it has
                Path(options.output).write_text(json.dumps(document, indent=1) + "\n")
    if device.type == "cuda":
        document["conditions"]["gpu_state_after"] = conditions.gpu_state(device)
    screen.finish(document)
    if options.output:
        Path(options.output).write_text(json.dumps(document, indent=1) + "\n")
    return document


def _ceilings(options: Options, device: torch.device) -> dict[str, Any]:
    given = "given"
    bandwidth, how = (
        (options.bandwidth * 1e12, given) if options.bandwidth else timing.measure_bandwidth(device)
    )
    flop_rate, how_flops = (
        (options.flop_rate * 1e12, given) if options.flop_rate else timing.measure_flop_rate(device)
    )
    return {
        "bytes_per_s": bandwidth,
        "bytes_per_s_from": how,
        "flop_per_s": flop_rate,
        "flop_per_s_from": how_flops,
    }


def split(names: str | None) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name.strip() for name in (names or "").split(",") if name.strip())
