"""The CUDA C++ prefill kernel on a Hopper GPU: checked against float64, timed beside its peers, its cycles per step counted.

    PYTHONPATH=. python benchmarks/bench_prefill_kernel.py [--parts check,time,cycles,power] [--seconds 150] [--json PATH]

Every part runs in a process of its own under a watchdog: a case that says nothing for 40 seconds is reported as hung, its process is ended and the
part goes on with the next case. ``check``: outputs and LSE against attention in float64, with NaN in all memory that no token was written to, the
same bits twice, and one captured graph replayed at other lengths. ``time``: TFLOP/s over visible keys (4 * head_dim * num_heads * sum of visible
keys), contenders in turns, medians of CUDA-graph replays: this kernel, the Triton kernel, torch's SDPA on contiguous tensors, and FlashAttention-3
(``flash_attn_interface``) with the same blocks and with one block per request. ``cycles``: clock cycles per step of 128 keys for tiles of 1 to
4 steps and for long ones, the start and end of tiles included, and what share of a CTA's cycles goes to waiting and storing. ``power``: clock and
power while one contender runs on and on. One JSON line per result; ``--json`` writes them as one document.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchpaged.bench.timing import CudaSampler, interleave
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.cuda import jit
from torchpaged.custom_ops.cuda import prefill as native
from torchpaged.custom_ops.masks import visible_keys

SILENCE_S = 40.0
SHARES = {"check": 0.5, "time": 0.65, "cycles": 0.7}  # most of the remaining time that a part may take
PATIENCE = 1 << 20  # tries of the loader's waits in checks


@dataclass(frozen=True)
class Case:
    """One batch: query and key lengths of its requests."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    block_size: int = 16
    causal: bool = True
    lse: bool = False
    dtype: torch.dtype = torch.bfloat16
    padding: int = 0  # token rows behind the last request
    dim_v: int = 0  # 0: as dim
    window_left: int = -1
    window_right: int = -1
    chunk: int = 0
    soft_cap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    layout: str = "NHD"  # of the pools; HND: heads outside of slots; both: keys and values in one allocation

    def macros(self, **options: Any) -> dict[str, int]:
        return native.prefill_macros(
            self.dtype, self.dim, self.heads[0] // self.heads[1], self.heads[1], self.block_size, self.causal, self.lse,
            dim_v=self.dim_v, **self.masks(), soft_cap=self.soft_cap > 0, alibi=self.alibi, sinks=self.sinks, **options,
        )  # fmt: skip

    def masks(self) -> dict[str, int]:
        return {"window_left": self.window_left, "window_right": self.window_right, "chunk": self.chunk}


def whole(*lengths: int, **options: Any) -> Case:
    return Case(lengths, lengths, **options)


CHECKS: dict[str, Case] = {
    "one token": whole(1),
    "one tile": whole(32),
    "one step": whole(128),
    "a little more": whole(129, 127, 16, 17),
    "700": whole(700),
    "ragged": whole(1, 300, 16, 77, 128, 513, 5, lse=True),
    "contexts": Case((3, 64, 200, 33), (500, 64, 700, 1025), lse=True),
    "empty": Case((5, 0, 17, 40, 0), (0, 30, 17, 23, 0), padding=50, lse=True),
    "long": whole(3000),
    "many": whole(*(1 + 37 * i % 211 for i in range(100)), lse=True),
    "no group": whole(300, 1, 260, heads=(4, 4), lse=True),
    "group of 2": whole(300, 77, heads=(8, 4)),
    "group of 8": Case((300, 40), (333, 400), heads=(16, 2)),
    "group of 7": Case((130, 40), (133, 400), heads=(14, 2), lse=True),
    "not causal": Case((130, 40, 7), (133, 400, 640), causal=False),
    "width 64": Case((300, 40, 129), (333, 400, 129), dim=64, lse=True),
    "blocks of 8": Case((300, 40), (333, 397), block_size=8),
    "blocks of 64": Case((300, 40), (333, 397), block_size=64),
    "blocks of 128": Case((300, 40), (333, 397), block_size=128),
    "fp16": whole(300, 40, dtype=torch.float16),
    "width 64, group of 7": whole(1, 500, 193, heads=(14, 2), dim=64),
    "width 96": Case((300, 40, 129), (333, 400, 129), dim=96, lse=True),
    "width 32": Case((300, 40, 129), (333, 400, 129), dim=32, lse=True),
    "width 192/128": Case((300, 40, 129), (333, 401, 129), dim=192, dim_v=128, heads=(8, 8), lse=True),
    "width 128/64": Case((300, 40), (333, 401), dim_v=64, lse=True),
    "width 192": Case((300, 40), (333, 401), dim=192, lse=True),
    "width 256": Case((300, 40, 129, 1), (333, 401, 129, 64), dim=256, heads=(16, 8), lse=True),
    "width 256, blocks of 64": Case((300, 40), (333, 401), dim=256, heads=(8, 2), block_size=64),
    "window": Case((700, 40, 129), (1333, 401, 129), window_left=200, lse=True),
    "narrow window": Case((300, 40, 129), (333, 1401, 129), window_left=5),
    "window, not causal": Case((300, 40, 129), (333, 401, 129), window_left=30, window_right=70, causal=False, lse=True),
    "right window alone": Case((300, 40), (333, 401), window_right=150, causal=False),
    "chunks": Case((700, 40, 129), (1333, 401, 129), chunk=300, lse=True),
    "chunks of 16, not causal": Case((300, 129), (333, 129), chunk=16, causal=False),
    "soft cap": Case((300, 40), (333, 401), soft_cap=2.0, lse=True),
    "alibi": Case((300, 40), (333, 1401), alibi=True, lse=True),
    "sinks": Case((300, 5, 40), (333, 0, 401), sinks=True, lse=True),
    "sinks, window, width 64": Case((300, 40), (333, 1401), sinks=True, window_left=127, dim=64, lse=True),
    "width 256, window, soft cap": Case((300, 40), (1333, 401), dim=256, heads=(16, 8), window_left=400, soft_cap=5.0, lse=True),
    "left padding": Case((300, 40, 20), (100, 1, -3), window_left=50, lse=True),
    "all of it": Case((300, 40), (1333, 401), window_left=100, soft_cap=3.0, alibi=True, sinks=True, chunk=777, lse=True),
    "HND": Case((300, 40), (333, 401), layout="HND"),
    "HND, width 96": Case((300, 40), (333, 401), layout="HND", dim=96),
    "keys beside values": Case((300, 40), (333, 401), layout="both"),
}
GRAPH = Case((100,) * 6, (400,) * 6, lse=True)
TIMES: dict[str, Case] = {
    "1 x 16k": whole(16384),
    "1 x 8k": whole(8192),
    "1 x 3000": whole(3000),
    "6 x 700": whole(*[700] * 6),
    "8 x 512": whole(*[512] * 8),
    "512 on 32k": Case((512,), (32768,)),
    "1 x 4k, width 64": whole(4096, dim=64),
    "1 x 4k, width 96": whole(4096, dim=96),
    "1 x 4k, width 256": whole(4096, dim=256, heads=(16, 8)),
    "1 x 4k, width 192/128": whole(4096, dim=192, dim_v=128, heads=(32, 32)),
    "1 x 16k, window 1k": whole(16384, window_left=1023),
}
CYCLES: dict[str, Case] = {
    **{f"{steps} steps": Case((128,) * 128, (128 * steps,) * 128, causal=False) for steps in (1, 2, 3, 4)},
    "128 steps": Case((512,), (16384,), causal=False),
    "1 x 16k": whole(16384),
    "8 x 512": whole(*[512] * 8),
}


def make_pools(case: Case, blocks: int, dim: int, dim_v: int, device: torch.device) -> list[Tensor]:
    """Keys' and values' pools ``[blocks, block_size, num_kv_heads, width]``, NaN all over, laid out as the case says."""
    slots, heads = case.block_size, case.heads[1]
    if case.layout == "both":
        pair = torch.full((blocks, 2, slots, heads, dim), torch.nan, dtype=case.dtype, device=device)
        return [pair[:, 0], pair[:, 1]]
    inner = (heads, slots) if case.layout == "HND" else (slots, heads)
    pools = [torch.full((blocks, *inner, width), torch.nan, dtype=case.dtype, device=device) for width in (dim, dim_v)]
    return [pool.transpose(1, 2) if case.layout == "HND" else pool for pool in pools]


POWER: dict[str, Case] = {"1 x 16k": whole(16384)}


class Inputs:
    """A case's tensors on the GPU; blocks in shuffled order, NaN wherever no token lies and in the block that unused table entries name."""

    def __init__(self, case: Case, *, capacity: int = 0) -> None:
        self.case = case
        device, generator = torch.device("cuda"), torch.Generator("cuda").manual_seed(0)
        heads, kv_heads = case.heads
        dim_v = case.dim_v or case.dim
        columns = max(1, -(-max(capacity, *case.seq_lens) // case.block_size))
        used = [-(-max(capacity, length, 0) // case.block_size) for length in case.seq_lens]
        ids = (torch.randperm(sum(used), generator=generator, device=device) + 1).int()
        self.table = torch.zeros(len(used), columns, dtype=torch.int32, device=device)
        self.k_cache, self.v_cache = make_pools(case, sum(used) + 1, case.dim, dim_v, device)
        self.keys, self.values = [], []
        for request, (count, own) in enumerate(zip(used, ids.split(used), strict=True)):
            length = max(capacity, case.seq_lens[request], 0)
            self.table[request, :count] = own
            for cache, kept in ((self.k_cache, self.keys), (self.v_cache, self.values)):
                new = torch.randn(length, kv_heads, cache.shape[3], generator=generator, device=device, dtype=case.dtype)
                kept.append(new)
                at = torch.arange(length, device=device)
                cache[own[at // case.block_size].long(), at % case.block_size] = new
        for request, count in enumerate(case.query_lens):  # blocks that no query sees any more are given back
            if case.window_left >= 0 and count:
                dropped = max(0, case.seq_lens[request] - count - case.window_left) // case.block_size
                self.k_cache[self.table[request, :dropped].long()] = torch.nan
                self.v_cache[self.table[request, :dropped].long()] = torch.nan
                self.table[request, :dropped] = 0
        self.num_tokens = sum(case.query_lens) + case.padding
        self.q = torch.randn(self.num_tokens, heads, case.dim, generator=generator, device=device, dtype=case.dtype)
        self.seq_lens, self.starts = (
            torch.empty(len(used), dtype=torch.int32, device=device),
            torch.empty(len(used) + 1, dtype=torch.int32, device=device),
        )
        self.set_lengths(case.query_lens, case.seq_lens)
        self.out = torch.full((*self.q.shape[:2], dim_v), torch.nan, dtype=case.dtype, device=device)
        self.lse = torch.full(self.q.shape[:2], torch.nan, device=device) if case.lse else None
        self.tickets = torch.zeros(2, dtype=torch.int32, device=device)
        self.scale = case.dim**-0.5
        self.slopes = torch.linspace(0.02, 0.5, heads, device=device) if case.alibi else None
        self.sinks = torch.randn(heads, generator=generator, device=device, dtype=case.dtype) * 3 if case.sinks else None

    def set_lengths(self, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
        """Other lengths in the same tensors."""
        self.case = dataclasses.replace(self.case, query_lens=query_lens, seq_lens=seq_lens)
        self.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        self.starts.copy_(torch.tensor([0, *query_lens]).cumsum(0).int())

    def native(self, clocks: Tensor | None = None, patience: int = 0, beside: bool = True) -> None:
        native.prefill(
            self.q, self.k_cache, self.v_cache, self.table, self.seq_lens, self.starts, self.out, self.lse, self.scale, self.case.causal,
            self.tickets, **self.case.masks(), soft_cap=self.case.soft_cap, alibi_slopes=self.slopes, sinks=self.sinks, clocks=clocks,
            patience=patience, beside=beside,
        )  # fmt: skip

    def triton(self) -> None:
        BACKEND_OPS["triton"].paged_attention(
            self.q, self.k_cache, self.v_cache, self.table, self.seq_lens, self.starts, self.out, self.lse,
            max_query_len=max(self.case.query_lens), scale=self.scale, causal=self.case.causal, window_left=self.case.window_left,
            window_right=self.case.window_right, chunk_size=self.case.chunk, logits_soft_cap=self.case.soft_cap, alibi_slopes=self.slopes,
            sinks=self.sinks,
        )  # fmt: skip

    def expected(self) -> tuple[Tensor, Tensor]:
        """Out and LSE in float64."""
        group = self.case.heads[0] // self.case.heads[1]
        out = torch.zeros(self.out.shape, dtype=torch.float64, device="cuda")
        lse = torch.full(self.q.shape[:2], -torch.inf, dtype=torch.float64, device="cuda")
        case, start = self.case, 0
        for request, (count, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
            rows = slice(start, start + count)
            start += count
            if length <= 0 or not count:
                continue
            position = torch.arange(length - count, length, device="cuda")
            seen = visible_keys(position, length, case.causal, case.window_left, case.window_right, case.chunk)
            sees, distance = seen.any(-1)[None], torch.arange(length, device="cuda") - position[:, None]
            for head in range(case.heads[1]):
                heads = slice(head * group, (head + 1) * group)
                q = self.q[rows, heads].double().transpose(0, 1)
                k, v = (kept[request][:length, head].double() for kept in (self.keys, self.values))
                scores = q @ k.t() * self.scale
                if case.soft_cap:
                    scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
                if self.slopes is not None:
                    scores = scores + self.slopes[heads].double()[:, None, None] * distance
                scores = scores.masked_fill(~seen, -torch.inf)
                total = scores.logsumexp(-1)
                if self.sinks is not None:
                    total = torch.where(sees, torch.logaddexp(total, self.sinks[heads].double()[:, None]), total)
                lse[rows, heads] = total.t()
                out[rows, heads] = ((scores - total[..., None]).exp().nan_to_num(0.0) @ v).transpose(0, 1)
        return out, lse

    def visible(self) -> int:
        """Keys that queries see, all queries together."""
        case, pairs = self.case, 0
        for count, length in zip(case.query_lens, case.seq_lens, strict=True):
            for position in range(length - count, length):
                pairs += (position + 1 if case.causal else length) - (max(0, position - case.window_left) if case.window_left >= 0 else 0)
        return pairs


def compare(inputs: Inputs) -> dict[str, Any]:
    """What is wrong with ``inputs.out`` and ``inputs.lse``; ``ok``: nothing."""
    out, lse = inputs.expected()
    got = inputs.out.double()
    difference = (got - out).abs()
    result: dict[str, Any] = {
        "relative_error": float((got - out).norm() / out.norm().clamp(min=1e-30)), "largest_error": float(difference.max()),
        "nan": int(got.isnan().any(-1).sum()), "lse_error": 0.0,
    }  # fmt: skip
    empty = lse == -torch.inf
    ok = result["relative_error"] < 6e-3 and result["largest_error"] < 0.04 and bool((inputs.out[empty] == 0).all())
    if inputs.lse is not None:
        result["lse_error"] = float((inputs.lse.double() - lse)[~empty].abs().max()) if (~empty).any() else 0.0
        ok = ok and result["lse_error"] < 1e-3 and bool((inputs.lse[empty] == -torch.inf).all())
    if not ok:
        wrong = ((difference > 0.04) | got.isnan()).any(-1).nonzero().tolist()
        result["wrong_rows"] = len(wrong)
        result["first_wrong"] = wrong[:6]
    return result | {"ok": ok}


def check(case: Case) -> dict[str, Any]:
    """Against float64; the same bits twice; tickets given back."""
    inputs = Inputs(case)
    inputs.native(patience=PATIENCE)
    torch.cuda.synchronize()
    result = compare(inputs)
    first = inputs.out.clone()
    inputs.out.fill_(torch.nan)
    inputs.native(patience=PATIENCE)
    torch.cuda.synchronize()
    result["same_bits"] = bool(torch.equal(first, inputs.out))
    result["tickets_back"] = inputs.tickets.tolist() == [0, 0]
    result["ok"] = result["ok"] and result["same_bits"] and result["tickets_back"]
    return result


def check_graph() -> dict[str, Any]:
    """One captured graph at other lengths, padding and empty requests among them."""
    inputs = Inputs(GRAPH, capacity=700)
    inputs.native(patience=PATIENCE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.native(patience=PATIENCE)
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
    k, v = (inputs.k_cache, inputs.v_cache) if paged else (torch.stack(kept) for kept in (inputs.keys, inputs.values))
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
        "native": inputs.native, "triton": inputs.triton, "sdpa": sdpa(inputs), "fa3": fa3(inputs, True), "fa3 one block": fa3(inputs, False),
    }  # fmt: skip
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


def count_cycles(case: Case) -> dict[str, Any]:
    """Cycles per step, medians over the CTAs that had work, after a warm-up; with and without what holds the exponentials beside the products."""
    inputs = Inputs(case)
    clocks = torch.zeros(torch.cuda.get_device_properties(0).multi_processor_count, 5, dtype=torch.int64, device="cuda")
    flops, result = 4 * case.dim * case.heads[0] * inputs.visible(), {"ok": True}
    for name, beside in (("beside", True), ("free", False)):
        for _ in range(20):
            inputs.native(clocks, beside=beside)
        torch.cuda.synchronize()
        cycles = [(c[0], c[4]) for c in clocks.tolist() if c[4]]
        waits = clocks.sum(0).tolist()
        calls = [lambda beside=beside: inputs.native(clocks, beside=beside)] * max(1, min(20, round(1e12 / flops)))  # type: ignore[misc]
        us = interleave({"native": CudaSampler(calls)}, 8)["native"].median_us
        result[name] = {
            "cycles_per_step": round(statistics.median(c / s for c, s in cycles), 1), "most_cycles": max(c for c, _ in cycles),
            "steps": waits[4], "waiting_for_tiles": round(waits[1] / waits[0], 4), "waiting_for_keys": round(waits[2] / waits[0], 4),
            "storing": round(waits[3] / waits[0], 4), "us": round(us, 1), "tflops": round(flops / us / 1e6, 1),
        }  # fmt: skip
    return result


def measure_power(case: Case) -> dict[str, Any]:
    """Clock and power of a second of each contender: whether cycles or the power limit bind."""
    inputs, result = Inputs(case), dict[str, Any](ok=True)
    flops = 2 * (case.dim + (case.dim_v or case.dim)) * case.heads[0] * inputs.visible()
    for name, call in {"native": inputs.native, "fa3": fa3(inputs, True), "fa3 one block": fa3(inputs, False)}.items():
        if isinstance(call, str):
            result[name] = call
            continue
        sampler = CudaSampler([call])
        command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "50"]
        watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        samples, stop = list[float](), time.monotonic() + 1.5
        while time.monotonic() < stop:
            samples += sampler.burst(20)
        watcher.terminate()
        assert watcher.stdout
        lines = [line.split(",") for line in watcher.stdout.read().splitlines()]
        busy = [(float(clock), float(power)) for clock, power in (line for line in lines if len(line) == 2)][-12:-2]
        result[name] = {
            "mhz": statistics.median(clock for clock, _ in busy), "watts": statistics.median(power for _, power in busy),
            "tflops": round(flops / statistics.median(samples[len(samples) // 2 :]) / 1e6, 1),
        }  # fmt: skip
    return result


PARTS: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    "check": {**{name: lambda case=case: check(case) for name, case in CHECKS.items()}, "graph": check_graph},  # type: ignore[misc]
    "time": {name: lambda case=case: measure(case) for name, case in TIMES.items()},  # type: ignore[misc]
    "cycles": {name: lambda case=case: count_cycles(case) for name, case in CYCLES.items()},  # type: ignore[misc]
    "power": {name: lambda case=case: measure_power(case) for name, case in POWER.items()},  # type: ignore[misc]
}


def work(part: str, cases: list[str]) -> None:
    """Some cases of a part, in this process."""
    for name in cases:
        print(json.dumps({"begin": name}), flush=True)
        try:
            result = PARTS[part][name]()
        except Exception as problem:
            result = {"ok": False, "raised": f"{type(problem).__name__}: {problem}"[:400]}
        print(json.dumps({"part": part, "case": name, **result}), flush=True)
        if "raised" in result and ("CUDA error" in result["raised"] or "cuLaunch" in result["raised"]):
            raise SystemExit(3)  # the context is lost


def specialisations() -> dict[tuple[str, str], list[tuple[tuple[str, int], ...]]]:
    """Part and case -> the macros of what it launches."""
    needed = {("check", name): [case.macros(patience=PATIENCE)] for name, case in CHECKS.items()}
    needed["check", "graph"] = [GRAPH.macros(patience=PATIENCE)]
    needed |= {("time", name): [case.macros()] for name, case in TIMES.items()}
    needed |= {("power", name): [case.macros()] for name, case in POWER.items()}
    needed |= {("cycles", name): [case.macros(clocks=True, beside=beside) for beside in (True, False)] for name, case in CYCLES.items()}
    return {key: [tuple(sorted(macros.items())) for macros in values] for key, values in needed.items()}


def compile_ahead(parts: list[str]) -> dict[tuple[str, str], str]:
    """Specialisations into the cache on disk, side by side: a case's 40 seconds are not for compilers. Part and case -> why it can't run."""
    needed = {key: values for key, values in specialisations().items() if key[0] in parts}
    distinct = list(dict.fromkeys(macros for values in needed.values() for macros in values))
    begin = time.monotonic()
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), multiprocessing.get_context("fork")) as pool:
        errors = dict(zip(distinct, pool.map(compile_one, distinct), strict=True))
    print(f"{len(distinct)} specialisations compiled in {time.monotonic() - begin:.1f} s", flush=True)
    found = {key: next((error for macros in values if (error := errors[macros])), "") for key, values in needed.items()}
    return {key: error for key, error in found.items() if error}


def compile_one(macros: tuple[tuple[str, int], ...]) -> str:
    """The compiler's first complaint, or nothing."""
    try:
        jit.machine_code("prefill.cu", dict(macros), (9, 0))
    except Exception as problem:
        lines = str(problem).splitlines() or [type(problem).__name__]
        return next((line for line in lines if "error" in line), lines[0])[:300]
    return ""


class Report:
    """Results as they come: a line each, and one document that is whole after every case."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.results = path, list[dict[str, Any]]()

    def add(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        print(json.dumps(result), flush=True)
        if self.path:
            document = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "results": self.results}
            self.path.write_text(json.dumps(document, indent=1) + "\n")


def supervise(part: str, names: list[str], stop: float, report: Report) -> None:
    """Cases of a part in other processes, one after the other, each until it hangs or fails."""
    while names and time.monotonic() < stop:
        command = [sys.executable, str(Path(__file__).resolve()), "--work", part, "--cases", json.dumps(names)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        assert process.stdout and process.stderr
        errors: list[str] = []
        threading.Thread(target=lambda p=process, q=lines: [*map(q.put, p.stdout), q.put(None)], daemon=True).start()  # type: ignore[misc]
        reader = threading.Thread(target=lambda p=process, e=errors: e.append(p.stderr.read()), daemon=True)  # type: ignore[misc]
        reader.start()
        before = len(names)
        while names:
            try:
                line = lines.get(timeout=max(0.1, min(SILENCE_S, stop - time.monotonic())))
            except queue.Empty:
                late = time.monotonic() >= stop
                report.add({"part": part, "case": names.pop(0), "ok": False, **({"time is up": True} if late else {"hung": True})})
                break
            if line is None:
                break
            told = json.loads(line) if line.startswith("{") else {}
            if "case" in told:
                report.add(told)
                names = names[1:]
        process.kill()
        process.wait()
        reader.join(5)
        if len(names) == before:  # it ended in the middle of a case
            report.add({"part": part, "case": names.pop(0), "ok": False, "died": "".join(errors)[-600:]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="check,time,cycles,power")
    parser.add_argument("--seconds", type=float, default=150.0, help="nothing runs on after this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, json.loads(args.cases))
        return
    stop, report, parts = time.monotonic() + args.seconds, Report(args.json), args.parts.split(",")
    refused = compile_ahead(parts)
    for part in parts:
        for (of, name), error in refused.items():
            if of == part:
                report.add({"part": part, "case": name, "ok": False, "does not compile": error})
        end = time.monotonic() + (stop - time.monotonic()) * SHARES.get(part, 1.0)  # cases that hang leave time for the other parts
        supervise(part, [name for name in PARTS[part] if (part, name) not in refused], end, report)
    bad = [f"{r['part']}: {r['case']}" for r in report.results if not r["ok"]]
    print(f"{len(report.results) - len(bad)} of {len(report.results)} cases fine" + (f"; not: {', '.join(bad)}" if bad else ""))


if __name__ == "__main__":
    main()
