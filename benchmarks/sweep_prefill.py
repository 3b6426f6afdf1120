"""Tile shapes of the Triton prefill kernel, swept on a GPU: each is checked against torch's SDPA in float32,
then timed.

    python benchmarks/sweep_prefill.py [--cases 1x16k,1x4k,8x512,chunk_512_on_32k] [--best 4] [--seconds 130]

32 query and 8 kv heads of 128, bfloat16, blocks of 16 tokens in shuffled order. The first case takes all
candidates, the others the best of it and those for short prompts. Times are medians of CUDA-graph replays;
TFLOP/s count visible keys only: 4 * head_dim * num_heads * sum of visible keys. One JSON line per result,
then all of them sorted, then the layouts of the cache and torch's SDPA on contiguous tensors for comparison.
Choices drawn from it stand in custom_ops/attention/triton/config.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.triton import config
from torchpaged.custom_ops.attention.triton.config import Tiles

HEADS, KV_HEADS, DIM = 32, 8, 128
#: case -> (requests, query_len, seq_len)
CASES = {
    "1x16k": (1, 16384, 16384),
    "1x4k": (1, 4096, 4096),
    "8x512": (8, 512, 512),
    "chunk_512_on_32k": (1, 512, 32768),
}
#: The chosen tiles first, what could beat them after. Predictions and figures: docs/log/prefill_triton.md.
CANDIDATES = [
    Tiles(128, 128, 8, 3),
    Tiles(128, 128, 8, 2),
    Tiles(128, 64, 8, 3),
    Tiles(128, 64, 8, 4),
    Tiles(256, 64, 8, 3),
    Tiles(256, 32, 8, 4),
]
SHORT = [Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 2)]


class Inputs:
    """One case's tensors; ``layout``: 'shuffled' or 'sequential' blocks."""

    def __init__(self, case: str, block_size: int = 16, layout: str = "shuffled") -> None:
        self.requests, self.query_len, self.seq_len = CASES[case]
        device, dtype = torch.device("cuda"), torch.bfloat16
        generator = torch.Generator(device).manual_seed(0)
        per_row = self.seq_len // block_size
        count = self.requests * per_row
        ids = (
            torch.randperm(count, generator=generator, device=device)
            if layout == "shuffled"
            else torch.arange(count, device=device)
        )
        self.table = (ids + 1).int().view(self.requests, per_row)
        pool = (count + 1, block_size, KV_HEADS, DIM)
        self.k_cache, self.v_cache = (
            torch.randn(pool, generator=generator, device=device, dtype=dtype) for _ in range(2)
        )
        self.q = torch.randn(
            self.requests * self.query_len, HEADS, DIM, generator=generator, device=device, dtype=dtype
        )
        self.seq_lens = torch.full((self.requests,), self.seq_len, device=device, dtype=torch.int32)
        self.starts = torch.arange(self.requests + 1, device=device, dtype=torch.int32) * self.query_len
        self.out = torch.empty_like(self.q)
        hidden = self.seq_len - self.query_len
        visible = self.requests * sum(hidden + i + 1 for i in range(self.query_len))
        self.flops = 4 * DIM * HEADS * visible

    def attend(self) -> None:
        BACKEND_OPS["triton"].paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.table,
            self.seq_lens,
            self.starts,
            self.out,
            max_query_len=self.query_len,
            scale=DIM**-0.5,
        )

    def contiguous(self, request: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v ``[1, num_heads or num_kv_heads, tokens, head_dim]`` of one request."""
        rows = slice(request * self.query_len, (request + 1) * self.query_len)
        blocks = self.table[request].long()
        k, v = (
            cache[blocks].flatten(0, 1).transpose(0, 1)[None].to(dtype)
            for cache in (self.k_cache, self.v_cache)
        )
        return self.q[rows].transpose(0, 1)[None].to(dtype), k.contiguous(), v.contiguous()

    def expected(self) -> Tensor:
        """SDPA in float32, a kv head at a time to bound memory."""
        outs = []
        for request in range(self.requests):
            q, k, v = self.contiguous(request, torch.float32)
            position = torch.arange(self.seq_len - self.query_len, self.seq_len, device="cuda")
            mask = (
                None
                if self.query_len == self.seq_len
                else position[:, None] >= torch.arange(self.seq_len, device="cuda")
            )
            group = HEADS // KV_HEADS
            heads = [
                F.scaled_dot_product_attention(
                    q[:, h * group : (h + 1) * group],
                    k[:, h : h + 1].expand(-1, group, -1, -1),
                    v[:, h : h + 1].expand(-1, group, -1, -1),
                    attn_mask=mask,
                    is_causal=mask is None,
                )
                for h in range(KV_HEADS)
            ]
            outs.append(torch.cat(heads, 1)[0].transpose(0, 1))
        return torch.cat(outs)


def median_us(function: Callable[[], Any], budget_s: float = 0.4) -> float:
    """Median microseconds of a call, from graph replays of several calls each, as many as fit the budget."""
    function()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        function()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        calls = max(1, min(50, int(2.0 / max(begin.elapsed_time(end), 0.02))))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            function()
    times: list[float] = []
    graph.replay()
    stop = time.perf_counter() + budget_s
    while time.perf_counter() < stop or len(times) < 5:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def show(result: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(result), flush=True)
    return result


def label(tiles: Tiles) -> str:
    """Rows x keys x warps x stages."""
    return "x".join(map(str, tiles))


def measure(case: str, inputs: Inputs, tiles: Tiles, expected: Tensor) -> dict[str, Any]:
    """Check, then time one candidate; a failure is a result too."""
    config.prefill_tiles = lambda *_: tiles  # type: ignore[assignment]
    result: dict[str, Any] = {"case": case, "tiles": label(tiles)}
    started = time.perf_counter()
    try:
        inputs.out.fill_(float("nan"))
        inputs.attend()
        torch.cuda.synchronize()
        result["compile_s"] = round(time.perf_counter() - started, 1)
        error = ((inputs.out.float() - expected).norm() / expected.norm()).item()
        if not error < 1e-2:
            return show(result | {"error": f"relative error {error:.3e}"})
        us = median_us(inputs.attend)
    except Exception as problem:  # out of shared memory, a refused compile: noted, the sweep goes on
        if "CUDA error" in str(problem):  # the context is lost
            raise
        return show(result | {"error": f"{type(problem).__name__}: {problem}"[:200]})
    return show(
        result
        | {"relative_error": round(error, 5), "us": round(us, 1), "tflops": round(inputs.flops / us / 1e6, 1)}
    )


def compare(case: str, tiles: Tiles) -> None:
    """``tiles`` on other layouts of the cache, one block per request included, and torch's SDPA on
    contiguous tensors.

    The first layout comes again at the end: clocks drift.
    """
    config.prefill_tiles = lambda *_: tiles  # type: ignore[assignment]
    whole = CASES[case][2]
    layouts = [
        (16, "shuffled"),
        (16, "sequential"),
        (64, "shuffled"),
        (128, "shuffled"),
        (256, "sequential"),
        (whole, "sequential"),
    ]
    layouts.append(layouts[0])
    for block_size, layout in layouts:
        inputs = Inputs(case, block_size, layout)
        us = median_us(inputs.attend)
        show(
            {
                "case": case,
                "tiles": label(tiles),
                "block_size": block_size,
                "blocks": layout,
                "us": round(us, 1),
                "tflops": round(inputs.flops / us / 1e6, 1),
            }
        )
    q, k, v = Inputs(case).contiguous(0, torch.bfloat16)
    us = median_us(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    show(
        {
            "case": case,
            "contender": "torch SDPA",
            "us": round(us, 1),
            "tflops": round(inputs.flops / us / 1e6, 1),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument(
        "--best", type=int, default=4, help="candidates of the first case that the others take"
    )
    parser.add_argument("--seconds", type=float, default=130.0, help="no new measurement starts after this")
    args = parser.parse_args()
    stop = time.perf_counter() + args.seconds
    results: list[dict[str, Any]] = []
    best = CANDIDATES
    for case in args.cases.split(","):
        inputs = Inputs(case)
        expected = inputs.expected()
        measured = []
        for tiles in best + [t for t in SHORT if case == "8x512" and t not in best]:
            if time.perf_counter() > stop:
                show({"case": case, "skipped": "out of time", "tiles": str(tiles)})
                break
            measured.append((measure(case, inputs, tiles, expected), tiles))
        results += [result for result, _ in measured]
        ranked = [
            tiles
            for result, tiles in sorted(measured, key=lambda m: -m[0].get("tflops", 0.0))
            if "tflops" in result
        ]
        if best is CANDIDATES and ranked:
            compare(case, ranked[0])
            best = ranked[: args.best]
    print("sorted:")
    for result in sorted(results, key=lambda r: (r["case"], -r.get("tflops", 0.0))):
        show(result)


if __name__ == "__main__":
    main()
