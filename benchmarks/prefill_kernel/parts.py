"""What is done with a case: checked, timed, its power measured."""

import importlib
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measuring.timing import CudaSampler, interleave

from prefill_kernel.cases import CHECKS, GRAPH, POWER, TIMES, Case
from prefill_kernel.inputs import Inputs, compare


def check(case: Case) -> dict[str, Any]:
    """Against float64; the same bits twice; tickets given back."""
    inputs = Inputs(case)
    inputs.native()
    torch.cuda.synchronize()
    result = compare(inputs)
    first = inputs.out.clone()
    inputs.out.fill_(torch.nan)
    inputs.native()
    torch.cuda.synchronize()
    result["same_bits"] = bool(torch.equal(first, inputs.out))
    result["tickets_back"] = inputs.tickets.tolist() == [0, 0]
    result["ok"] = result["ok"] and result["same_bits"] and result["tickets_back"]
    return result


def check_graph() -> dict[str, Any]:
    """One captured graph at other lengths, padding and empty requests among them."""
    inputs = Inputs(GRAPH, capacity=700)
    inputs.native()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.native()
    results = []
    lengths = [
        ((100,) * 6, (400,) * 6),
        ((1, 0, 300, 7, 100, 2), (1, 0, 300, 700, 130, 2)),
        ((0,) * 6, (0,) * 6),
        ((600, *[0] * 5), (700, *[5] * 5)),
    ]
    for query_lens, seq_lens in lengths:
        inputs.set_lengths(query_lens, seq_lens)
        inputs.out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        results.append(compare(inputs))
    return {"ok": all(r["ok"] for r in results), "replays": results}


def sdpa(inputs: Inputs) -> Callable[[], Any] | str:
    """torch's on contiguous tensors, where all requests are alike and begin with their first token."""
    case = inputs.case
    if len(set(case.seq_lens)) > 1 or case.query_lens != case.seq_lens or case.window_left >= 0:
        return "lengths it has no causal mask for"
    requests, length = len(case.seq_lens), case.seq_lens[0]
    q = inputs.q.view(requests, length, *inputs.q.shape[1:]).transpose(1, 2)
    k, v = (torch.stack(kept).transpose(1, 2) for kept in (inputs.keys, inputs.values))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def fa3(inputs: Inputs, paged: bool) -> Callable[[], Any] | str:
    """FlashAttention-3 on the same blocks, or on one block per request."""
    try:
        module: Any = importlib.import_module("flash_attn_interface")
    except Exception as error:  # its libraries may fail to load in many ways
        return f"{type(error).__name__}: {error}"[:200]
    case = inputs.case
    requests, query_len, longest = len(case.seq_lens), case.query_lens[0], max(case.seq_lens)
    q = inputs.q.view(requests, query_len, *inputs.q.shape[1:])
    k, v = (
        (inputs.k_cache, inputs.v_cache)
        if paged
        else (torch.stack(kept) for kept in (inputs.keys, inputs.values))
    )
    options: dict[str, Any] = {"page_size": case.block_size} if paged else {}
    window = (case.window_left, 0 if case.window_left >= 0 else -1)
    metadata = module.get_scheduler_metadata(
        requests,
        query_len,
        longest,
        *case.heads,
        case.dim,
        inputs.seq_lens,
        qkv_dtype=case.dtype,
        headdim_v=case.dim_v or case.dim,
        causal=True,
        window_size=window,
        **options,
    )
    table = {"page_table": inputs.table} if paged else {}
    return lambda: module.flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=inputs.seq_lens,
        softmax_scale=inputs.scale,
        causal=True,
        window_size=window,
        scheduler_metadata=metadata,
        **table,
    )


def measure(case: Case) -> dict[str, Any]:
    """TFLOP/s of all contenders in turns; outputs of the native kernel against Triton's first."""
    inputs = Inputs(case)
    inputs.triton()
    want = inputs.out.float()
    inputs.out.fill_(torch.nan)
    inputs.native()
    error = float((inputs.out.float() - want).norm() / want.norm())
    calls: dict[str, Callable[[], Any] | str] = {
        "native": inputs.native,
        "triton": inputs.triton,
        "sdpa": sdpa(inputs),
        "fa3": fa3(inputs, True),
        "fa3 one block": fa3(inputs, False),
    }
    flops = 2 * (case.dim + (case.dim_v or case.dim)) * case.heads[0] * inputs.visible()
    result: dict[str, Any] = {"error": error, "ok": error < 8e-3, "tflops": {}, "us": {}, "absent": {}}
    samplers = {}
    for name, call in calls.items():
        try:
            if isinstance(call, str):
                result["absent"][name] = call
            else:
                samplers[name] = CudaSampler([call] * max(1, min(20, round(1e12 / flops))))
        except Exception as problem:  # a peer that refuses the case
            result["absent"][name] = f"{type(problem).__name__}: {problem}"[:200]
    for name, timing in interleave(samplers, 12).items():
        result["us"][name] = round(timing.median_us, 1)
        result["tflops"][name] = round(flops / timing.median_us / 1e6, 1)
    return result


def measure_power(case: Case) -> dict[str, Any]:
    """Clock and power of a second of each contender: whether cycles or the power limit bind."""
    inputs, result = Inputs(case), dict[str, Any](ok=True)
    flops = 2 * (case.dim + (case.dim_v or case.dim)) * case.heads[0] * inputs.visible()
    for name, call in {
        "native": inputs.native,
        "fa3": fa3(inputs, True),
        "fa3 one block": fa3(inputs, False),
    }.items():
        if isinstance(call, str):
            result[name] = call
            continue
        sampler = CudaSampler([call])
        command = [
            "nvidia-smi",
            "--query-gpu=clocks.sm,power.draw",
            "--format=csv,noheader,nounits",
            "-lms",
            "50",
        ]
        watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        samples, stop = list[float](), time.monotonic() + 1.5
        while time.monotonic() < stop:
            samples += sampler.burst(20)
        watcher.terminate()
        assert watcher.stdout
        lines = [line.split(",") for line in watcher.stdout.read().splitlines()]
        busy = [(float(clock), float(power)) for clock, power in (line for line in lines if len(line) == 2)][
            -12:-2
        ]
        result[name] = {
            "mhz": statistics.median(clock for clock, _ in busy),
            "watts": statistics.median(power for _, power in busy),
            "tflops": round(flops / statistics.median(samples[len(samples) // 2 :]) / 1e6, 1),
        }
    return result


PARTS: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    "check": {**{name: lambda case=case: check(case) for name, case in CHECKS.items()}, "graph": check_graph},  # type: ignore[misc]
    "time": {name: lambda case=case: measure(case) for name, case in TIMES.items()},  # type: ignore[misc]
    "power": {name: lambda case=case: measure_power(case) for name, case in POWER.items()},  # type: ignore[misc]
}
