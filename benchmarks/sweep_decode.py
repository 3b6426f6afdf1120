"""Sweep of the decode kernel's tiles on a GPU: python benchmarks/sweep_decode.py OUT.json [--cases SUBSTRING]
[--workers N].

Every configuration is checked against plain torch first, then timed by replaying a CUDA graph over KV caches
that rotate beyond L2. One JSON line per (case, configuration); the best per case last. What came of
it: docs/log/decode.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from dataclasses import dataclass
from typing import Any

import torch
from attention_peers.suites import SUITES

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.cuda import decode, specialise
from torchpaged.custom_ops.attention.triton import config


@dataclass
class Case:
    """One batch of decodes."""

    name: str
    heads: tuple[int, int, int]
    lens: list[int]
    block_size: int = 16
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def kv_bytes(self) -> int:
        return 2 * sum(self.lens) * self.heads[1] * self.heads[2] * self.kv_dtype.itemsize


def cases() -> list[Case]:
    """The benchmark's decode cases, those with fp8 caches included."""
    return [
        Case(c.name, (c.num_heads, c.num_kv_heads, c.head_dim), list(c.seq_lens), c.block_size, c.kv_dtype)
        for suite in ("decode", "decode-fp8")
        for c in SUITES[suite]
    ]


#: ("triton", keys, warps, stages, programs per multiprocessor, least tiles, slices) or
#: ("cuda", warps, keys per warp, stages, CTAs per multiprocessor, least tiles[, cluster, stages before the
#: wait, tiles into L2 before it, kv heads of a pair])
CONFIGS: dict[int, list[tuple[Any, ...]]] = {
    128: [
        ("triton", 16, 1, 4, 8, 4, 1),
        ("cuda", 4, 16, 3, 2, 2),
        ("cuda", 4, 16, 3, 2, 1),
        ("cuda", 4, 16, 4, 1, 1),
        ("cuda", 4, 16, 2, 3, 2),
        ("cuda", 8, 16, 3, 1, 1),
        ("cuda", 2, 16, 4, 3, 2),
        ("cuda", 4, 32, 3, 1, 1),
        ("cuda", 8, 16, 2, 1, 1),
        ("cuda", 2, 16, 3, 4, 4),
        ("cuda", 1, 16, 3, 8, 4),
        ("cuda", 4, 32, 2, 2, 1),
    ],
    64: [
        ("triton", 64, 4, 4, 3, 1, 4),
        ("cuda", 4, 16, 3, 4, 2),
        ("cuda", 4, 32, 3, 2, 1),
        ("cuda", 4, 32, 2, 3, 1),
        ("cuda", 8, 16, 3, 2, 1),
        ("cuda", 8, 32, 3, 1, 1),
        ("cuda", 4, 16, 5, 2, 2),
        ("cuda", 4, 16, 4, 3, 2),
        ("cuda", 8, 32, 2, 1, 1),
        ("cuda", 4, 32, 3, 3, 1),
        ("cuda", 2, 32, 3, 4, 2),
    ],
}


def inputs(case: Case, layers: int, lens: list[int]) -> dict[str, Any]:
    num_heads, num_kv_heads, dim = case.heads
    blocks = [-(-n // case.block_size) for n in lens]
    total = sum(blocks) + 1
    ids = (torch.randperm(total - 1, device="cuda") + 1).int()
    table = torch.zeros(len(lens), max(blocks), dtype=torch.int32, device="cuda")
    taken = 0
    for row, n in enumerate(blocks):
        table[row, :n] = ids[taken : taken + n]
        taken += n
    pools = []
    for _ in range(2 * layers):
        pool = torch.randn(total, case.block_size, num_kv_heads, dim, device="cuda", dtype=torch.bfloat16)
        pools.append(pool.to(case.kv_dtype))
    return {
        "q": torch.randn(len(lens), num_heads, dim, device="cuda", dtype=torch.bfloat16),
        "pools": pools,
        "table": table,
        "lens": torch.tensor(lens, dtype=torch.int32, device="cuda"),
        "starts": torch.arange(len(lens) + 1, dtype=torch.int32, device="cuda"),
        "semaphore": torch.zeros(len(lens) * num_kv_heads, dtype=torch.int32, device="cuda"),
    }


def call(case: Case, x: dict[str, Any], layer: int, out: torch.Tensor, backend: str) -> None:
    BACKEND_OPS[backend].paged_attention(
        x["q"],
        x["pools"][2 * layer],
        x["pools"][2 * layer + 1],
        x["table"],
        x["lens"],
        x["starts"],
        out,
        max_query_len=1,
        scale=case.heads[2] ** -0.5,
        semaphore=x["semaphore"],
    )


def use(case: Case, setting: tuple[Any, ...]) -> None:
    if setting[0] == "cuda":
        specialise.decode_shape = lambda *_: specialise.DecodeShape(*setting[1:])  # type: ignore[assignment]
        decode._specialised.cache_clear()
        return
    _, keys, warps, stages, per_sm, least, slices = setting
    config.decode_tiles = lambda dim, rows, kv, size: config.DecodeTiles(
        max(8 if slices else 16, rows), keys, warps, stages, per_sm, least, slices
    )  # type: ignore[assignment]


def error(case: Case, x: dict[str, Any], out: torch.Tensor) -> float:
    """Relative error of the last and the longest request against float32."""
    num_heads, num_kv_heads, dim = case.heads
    worst = 0.0
    for row in {len(case.lens) - 1, max(range(len(case.lens)), key=case.lens.__getitem__)}:
        n = case.lens[row]
        blocks = x["table"][row, : -(-n // case.block_size)].long()
        k, v = (pool[blocks].flatten(0, 1)[:n].float() for pool in x["pools"][:2])
        q = x["q"][row].float().view(num_kv_heads, -1, dim)
        p = torch.softmax(torch.einsum("hgd,lhd->hgl", q, k) * dim**-0.5, -1)
        want = torch.einsum("hgl,lhd->hgd", p, v).reshape(num_heads, dim)
        worst = max(worst, float((out[row].float() - want).norm() / want.norm()))
    return worst


def microseconds(functions: list[Any], repeats: int = 15) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        functions[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) * 1e3 / len(functions))
    return sorted(times)[len(times) // 2]


def precompile(work: list[tuple[Case, tuple[Any, ...]]]) -> None:
    for case, setting in work:
        use(case, setting)
        x = inputs(case, 1, [min(n, 64) for n in case.lens])
        try:
            call(case, x, 0, torch.empty_like(x["q"]), setting[0])
        except Exception as reason:  # out of resources: reported when timed
            print(case.name, setting, repr(reason)[:100], file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output")
    parser.add_argument("--cases", default="")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument(
        "--configs", default="", help="JSON: {head_dim: [configuration, ...]}, configurations as in CONFIGS"
    )
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    table = (
        {int(k): [tuple(c) for c in v] for k, v in json.loads(options.configs).items()}
        if options.configs
        else CONFIGS
    )
    chosen = [c for c in cases() if any(part in c.name for part in options.cases.split(","))]
    work = list(
        {
            (c.heads, c.block_size, c.kv_dtype, len(c.lens), s): (c, s)
            for c in chosen
            for s in table[c.heads[2]]
        }.values()
    )
    context = multiprocessing.get_context("spawn")
    helpers = [
        context.Process(target=precompile, args=(work[i :: options.workers],)) for i in range(options.workers)
    ]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()
    rows = []
    for case in chosen:
        torch.cuda.empty_cache()
        layers = max(2, min(24, int(3.5 * 60e6 / case.kv_bytes) + 1)) if case.kv_bytes < 1e9 else 2
        calls = max(layers, 8) if case.kv_bytes < 1e9 else 4
        x = inputs(case, layers, case.lens)
        ideal = case.kv_bytes / 4.35e6
        for setting in table[case.heads[2]]:
            use(case, setting)
            out = torch.full_like(x["q"], float("nan"))
            row = {"case": case.name, "config": setting, "ideal": round(ideal, 1)}
            try:
                call(case, x, 0, out, setting[0])
                row["error"] = round(error(case, x, out), 5)
                row["us"] = round(
                    microseconds(
                        [functools.partial(call, case, x, i % layers, out, setting[0]) for i in range(calls)]
                    ),
                    2,
                )
            except Exception as reason:
                row["failed"] = repr(reason)[:200]
            rows.append(row)
            if "failed" in row or options.verbose:
                print(json.dumps(row), flush=True)
        del x
    with open(options.output, "w") as file:
        json.dump(rows, file)
    print("best per case")
    for case in chosen:
        done = sorted(
            (r for r in rows if r["case"] == case.name and "us" in r and r["error"] < 2e-2),
            key=lambda r: r["us"],
        )
        for r in done[:3]:
            print(
                f"{r['case']:28s} ideal {r['ideal']:7.1f}  {r['us']:8.2f} us  x{r['us'] / r['ideal']:.2f}  "
                f"{r['config']} err {r['error']}"
            )


if __name__ == "__main__":
    main()
