"""Attention against its peers, as one function and as ``python -m torchpaged.bench.attention`` (needs torch only).

    document = run(Options(suites=("decode",), peers=True))

For every case: inputs on the device, each contender checked against the float32 oracle, those that pass timed in turns. A contender
that can't run, is wrong or fails is reported as that and never left out. ``document`` holds the conditions, one row per case and a
summary; `main` prints it as one JSON line on stdout, and everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchpaged.bench import conditions, timing
from torchpaged.bench.cases import SUITES, AttentionCase, select_cases
from torchpaged.bench.contenders import Contender, Prepared, contenders
from torchpaged.bench.in_parts import in_parts_of
from torchpaged.bench.inputs import Inputs, error_limit, exact_outputs, free_bytes, make_inputs, needed_bytes, relative_error
from torchpaged.bench.screen import Screen
from torchpaged.bench.summary import compare, exit_code, summarise
from torchpaged.custom_ops.errors import ArgumentError, TorchpagedError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PLAN_LAYERS = 32  # layers of a model that share one plan, for the figures that include it


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        suites: names in ``cases.SUITES``; "all" = every suite but smoke.
        case: keep the cases whose name contains this.
        backends: own backends by name; None = those made for the device's type, without the reference.
        peers: whether to run the peers that are installed (absent ones are reported).
        skip: contenders to leave out.
        device: "auto", "cpu", "cuda", "cuda:1".
        dtype: fp32, bf16, fp16 for queries and caches (fp8 caches stay fp8); "" = the case's own.
        heads_first: lay the caches out as ``[num_blocks, num_kv_heads, block_size, head_dim]`` instead of tokens first.
        repeats: samples per contender at least, each a round over all layers' caches.
        bandwidth: memory ceiling in TB/s; None = measured.
        flop_rate: compute ceiling in TFLOP/s; None = measured.
        output: write the document here, after every case.
        plot: write a PNG here.
        json_only: print nothing but the JSON line.
    """

    suites: Sequence[str] = ("decode",)
    case: str = ""
    backends: Sequence[str] | None = None
    peers: bool = True
    skip: Sequence[str] = ()
    device: str = "auto"
    dtype: str = ""
    heads_first: bool = False
    repeats: int = 24
    bandwidth: float | None = None
    flop_rate: float | None = None
    output: str = ""
    plot: str = ""
    json_only: bool = False


@torch.inference_mode()
def run(options: Options, extra: Sequence[Contender] = ()) -> dict[str, Any]:
    """Run the benchmark and return its document: ``conditions``, ``ceilings``, ``rows``, ``summary``.

    Args:
        options: what to run.
        extra: further contenders, after the built-in ones.

    Raises:
        ArgumentError, BackendUnavailableError: an option names something unknown; nothing has run then.
    """
    if options.dtype and options.dtype not in DTYPES:
        raise ArgumentError("dtype", f"one of {', '.join(DTYPES)}", repr(options.dtype))
    if options.repeats < 1:
        raise ArgumentError("repeats", "at least 1", str(options.repeats))
    if options.plot:
        from torchpaged.bench.plot import require_matplotlib

        require_matplotlib()
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams, graphs and events below are the current device's
    cases = select_cases(options.suites, options.case, DTYPES.get(options.dtype))
    known = contenders(device, options.backends, options.peers, options.skip)
    everybody = [*known, *extra, *in_parts_of(known, cases)]
    document: dict[str, Any] = {"benchmark": "attention", "conditions": conditions.collect(device), "ceilings": _ceilings(options, device)}
    document["rows"] = []
    _free(device)
    with Screen(len(cases) * len(everybody), enabled=not options.json_only) as screen:
        for case in cases:
            document["rows"].append(
                measure_case(case, everybody, device, document["ceilings"], options.repeats, options.heads_first, screen.step)
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
    if options.plot:
        from torchpaged.bench.plot import plot

        plot(document, options.plot)
    return document


def _ceilings(options: Options, device: torch.device) -> dict[str, Any]:
    given = "given"
    bandwidth, how = (options.bandwidth * 1e12, given) if options.bandwidth else timing.measure_bandwidth(device)
    flop_rate, how_flops = (options.flop_rate * 1e12, given) if options.flop_rate else timing.measure_flop_rate(device)
    return {"bytes_per_s": bandwidth, "bytes_per_s_from": how, "flop_per_s": flop_rate, "flop_per_s_from": how_flops}


def measure_case(
    case: AttentionCase,
    everybody: Sequence[Contender],
    device: torch.device,
    ceilings: dict[str, Any],
    repeats: int,
    heads_first: bool = False,
    step: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """One row: the case, its ideal time, and per contender a ``status``: timed, absent, unsupported, wrong or failed."""
    ideal_us, bound = case.ideal_us(ceilings["bytes_per_s"], ceilings["flop_per_s"])
    calls = timing.calls_per_round(case, ideal_us)
    row: dict[str, Any] = {
        "case": case.name, "suite": case.suite, "num_heads": case.num_heads, "num_kv_heads": case.num_kv_heads, "head_dim": case.head_dim,
        "num_reqs": len(case.seq_lens), "kv_tokens": sum(case.seq_lens), "max_seq_len": max(case.seq_lens), "num_tokens": case.num_tokens,
        "block_size": case.block_size, "dtype": _short(case.dtype), "kv_dtype": _short(case.kv_dtype),
        "useful_bytes": case.useful_bytes(), "flops": case.flops(), "ideal_us": ideal_us, "bound": bound, "calls_per_round": calls,
        "contenders": {},
    }  # fmt: skip
    needed, free = needed_bytes(case), free_bytes(device)
    if free is not None and needed > free:
        step(case.name)
        return row | {"skipped": f"needs {needed / 2**30:.1f} GiB of memory on {device}, {free / 2**30:.1f} GiB are free"}
    inputs = make_inputs(case, device, heads_first)
    row["layers"], row["heads_first"] = inputs.num_layers, heads_first
    ends = (0, inputs.num_layers - 1)
    exact = {layer: exact_outputs(case, inputs, layer) for layer in ends}
    samplers: dict[str, timing.Sampler] = {}
    for contender in everybody:
        step(f"{case.name}: {contender.name}")
        entry, prepared = _admit(contender, case, inputs, device, exact)
        if prepared is not None:
            try:
                rounds = [prepared.calls[index % len(prepared.calls)] for index in range(calls)]
                samplers[contender.name] = timing.make_sampler(rounds, device)
            except Exception as error:  # a peer that can't be captured must not end the run
                entry |= {"status": "failed", "reason": f"while it was captured: {_describe(error)}"}
        row["contenders"][contender.name] = {"own": contender.own, **entry}
    for name, result in timing.interleave(samplers, repeats).items():
        us = result.median_us
        row["contenders"][name] |= {
            "status": "timed", "us": us, "p20_us": result.p20_us, "p80_us": result.p80_us, "samples": result.samples,
            "us_with_plan": us + row["contenders"][name].get("plan_us", 0.0) / PLAN_LAYERS, "tb_per_s": case.useful_bytes() / us / 1e6,
            "tflop_per_s": case.flops() / us / 1e6, "of_ideal": ideal_us / us,
        }  # fmt: skip
    del samplers, inputs, exact
    _free(device)
    return row | compare(row["contenders"], [contender.name for contender in everybody if contender.own])


def _admit(
    contender: Contender, case: AttentionCase, inputs: Inputs, device: torch.device, exact: dict[int, Any]
) -> tuple[dict[str, Any], Prepared | None]:
    """The gate: prepare a contender and compare its first and last call with the oracle. None = it is not to be timed."""
    reason = contender.unavailable()
    if reason:
        return {"status": "absent", "reason": reason}, None
    reason = contender.why_not(case, device)
    if reason:
        return {"status": "unsupported", "reason": reason}, None
    try:
        prepared = contender.prepare(case, inputs)
        errors = []
        for layer, reference in exact.items():
            out = prepared.calls[layer]()
            errors.append(relative_error(case, out, reference))
            out.fill_(float("nan"))  # the next call has to write every row itself
    except Exception as error:
        return {"status": "failed", "reason": _describe(error)}, None
    entry: dict[str, Any] = {"error": max(errors)} if math.isfinite(max(errors)) else {"error": None}
    if prepared.plan_us is not None:
        entry["plan_us"] = prepared.plan_us
    if not max(errors) <= error_limit(case):
        kind = f"relative error {max(errors):.2e} is over {error_limit(case):.0e}" if entry["error"] else "a row is not finite"
        return entry | {"status": "wrong", "reason": kind}, None
    return entry, prepared


def _free(device: torch.device) -> None:
    """Give cached memory back, so that what the next case needs is compared with what there is."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line without typer; returns the exit code."""
    parser = argparse.ArgumentParser(description="Paged attention against its peers; the last line of stdout is JSON.")
    parser.add_argument("--suite", action="append", help=f"all, {', '.join(SUITES)}; may be given several times; default: decode")
    parser.add_argument("--case", default="", help="keep cases whose name contains this")
    parser.add_argument("--backends", help="own backends, separated by commas; default: those for the device")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="run the peers")
    parser.add_argument("--skip", default="", help="contenders to leave out, separated by commas")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    parser.add_argument("--dtype", default="", help="fp32, bf16, fp16 instead of the cases' own")
    parser.add_argument("--heads-first", action="store_true", help="caches as [num_blocks, num_kv_heads, block_size, head_dim] in memory")
    parser.add_argument("--repeats", type=int, default=24, help="samples per contender at least")
    parser.add_argument("--bandwidth", type=float, help="memory ceiling in TB/s; default: measured")
    parser.add_argument("--flop-rate", type=float, help="compute ceiling in TFLOP/s; default: measured")
    parser.add_argument("--output", default="", help="write the document to this JSON file")
    parser.add_argument("--plot", default="", help="write a plot to this PNG file (needs matplotlib)")
    parser.add_argument("--json-only", action="store_true", help="print nothing but the JSON line")
    given = parser.parse_args(arguments)
    try:
        document = run(
            Options(
                given.suite or ("decode",), given.case, split(given.backends) or None, given.peers, split(given.skip), given.device,
                given.dtype, given.heads_first, given.repeats, given.bandwidth, given.flop_rate, given.output, given.plot, given.json_only,
            )
        )  # fmt: skip
    except TorchpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(document), flush=True)
    return exit_code(document)


def split(names: str | None) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name.strip() for name in (names or "").split(",") if name.strip())


if __name__ == "__main__":
    raise SystemExit(main())
