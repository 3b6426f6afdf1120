"""One case of the attention benchmark: every contender is checked, then those that pass are timed in turns.

    row = measure_case(case, contenders(device), device, ceilings, repeats=24)

A contender that can't run, is wrong or fails is reported as that and never left out.
"""

import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from measuring import timing

from attention_peers.cases import AttentionCase
from attention_peers.contender import Contender, Prepared
from attention_peers.inputs import (
    Inputs,
    error_limit,
    exact_outputs,
    free_bytes,
    make_inputs,
    needed_bytes,
    num_layers,
    relative_error,
)

PLAN_LAYERS = 32  # layers of a model that share one plan, for the figures that include it


def measure_case(
    case: AttentionCase,
    contenders: Sequence[Contender],
    device: torch.device,
    ceilings: dict[str, Any],
    repeats: int,
    heads_first: bool = False,
    step: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """One row: the case, its ideal time, and per contender a ``status``: timed, absent, unsupported, wrong
    or failed."""
    ideal_us, bound = case.ideal_us(ceilings["bytes_per_s"], ceilings["flop_per_s"])
    calls = timing.calls_per_round(num_layers(case), ideal_us)
    row = {**_facts(case), "ideal_us": ideal_us, "bound": bound, "calls_per_round": calls, "contenders": {}}
    needed, free = needed_bytes(case), free_bytes(device)
    if free is not None and needed > free:
        step(case.name)
        return row | {
            "skipped": f"needs {needed / 2**30:.1f} GiB of memory on {device}, "
            f"{free / 2**30:.1f} GiB are free"
        }
    inputs = make_inputs(case, device, heads_first)
    row["layers"], row["heads_first"] = inputs.num_layers, heads_first
    exact = {layer: exact_outputs(case, inputs, layer) for layer in (0, inputs.num_layers - 1)}
    samplers: dict[str, timing.Sampler] = {}
    for contender in contenders:
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
            "status": "timed",
            "us": us,
            "p20_us": result.p20_us,
            "p80_us": result.p80_us,
            "samples": result.samples,
            "us_with_plan": us + row["contenders"][name].get("plan_us", 0.0) / PLAN_LAYERS,
            "tb_per_s": case.useful_bytes() / us / 1e6,
            "tflop_per_s": case.flops() / us / 1e6,
            "of_ideal": ideal_us / us,
        }
    del samplers, inputs, exact
    free_memory(device)
    return row


def _facts(case: AttentionCase) -> dict[str, Any]:
    return {
        "case": case.name,
        "suite": case.suite,
        "num_heads": case.num_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim,
        "num_reqs": len(case.seq_lens),
        "kv_tokens": sum(case.seq_lens),
        "max_seq_len": max(case.seq_lens),
        "num_tokens": case.num_tokens,
        "block_size": case.block_size,
        "dtype": str(case.dtype).removeprefix("torch."),
        "kv_dtype": str(case.kv_dtype).removeprefix("torch."),
        "useful_bytes": case.useful_bytes(),
        "flops": case.flops(),
    }


def _admit(
    contender: Contender, case: AttentionCase, inputs: Inputs, device: torch.device, exact: dict[int, Any]
) -> tuple[dict[str, Any], Prepared | None]:
    """The gate: prepare a contender and compare its first and last call with the oracle. None = it is not to
    be timed."""
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
        kind = (
            f"relative error {max(errors):.2e} is over {error_limit(case):.0e}"
            if entry["error"]
            else "a row is not finite"
        )
        return entry | {"status": "wrong", "reason": kind}, None
    return entry, prepared


def free_memory(device: torch.device) -> None:
    """Give cached memory back, so that what the next case needs is compared with what there is."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
