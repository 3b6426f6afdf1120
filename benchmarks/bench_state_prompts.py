"""Prompts of gated delta nets: the device's own kernels against FlashInfer's, on one GPU.

    PYTHONPATH=. python benchmarks/bench_state_prompts.py [--only TEXT] [--own] [--seconds 60] [--output FILE]

Inputs are a model's: slices of what its convolution gives, queries and keys to be normalised, requests
without a past. ``own``, ``library``: ms of a call as a graph, medians of 15 replays; ``..._plain``: called
without one; ``first_s``: seconds of the library's first call, in which it compiles; ``errors``: of out and
states between the two. ``--own``: own kernels alone, over Kimi delta attention, too. The last line is one
JSON document.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from documents import command_line, write_rows
from torch import Tensor

from torchpaged.backends import get_backend
from torchpaged.custom_ops import BACKEND_OPS, BackendOps

#: Requests, tokens of each, key heads, heads, and requests of one token behind them: Qwen3.5 397B and 35B,
#: Qwen3-Next, by tensor-parallel shard.
GATED_DELTA: dict[str, tuple[int, ...]] = {
    "397B TP8 1x32768": (1, 32768, 2, 8),
    "397B TP1 4x8192": (4, 8192, 16, 64),
    "397B TP1 1x8192": (1, 8192, 16, 64),
    "35B 1x8192": (1, 8192, 16, 32),
    "397B TP4 1x8192": (1, 8192, 4, 16),
    "397B TP8 4x8192": (4, 8192, 2, 8),
    "397B TP8 1x2048": (1, 2048, 2, 8),
    "397B TP8 1x512": (1, 512, 2, 8),
    "Next TP2 1x4096": (1, 4096, 8, 16),
    "Next TP2 8x2048": (8, 2048, 8, 16),
    "Next TP2 32x256": (32, 256, 8, 16),
    "Next TP1 1x2048": (1, 2048, 16, 32),
    "Next TP1 1x512": (1, 512, 16, 32),
    "Next TP1 8x100": (8, 100, 16, 32),
    "Next TP1 1x128": (1, 128, 16, 32),
    "Next TP1 1x512 + 32x1": (1, 512, 16, 32, 32),
    "Next TP1 1x2048 + 64x1": (1, 2048, 16, 32, 64),
    "397B TP8 1x512 + 64x1": (1, 512, 2, 8, 64),
}
#: The same of Kimi delta attention: a decay for each column of the keys, as many key heads as heads.
KIMI: dict[str, tuple[int, ...]] = {
    "KDA 1x4096": (1, 4096, 16, 16),
    "KDA 1x8192": (1, 8192, 32, 32),
    "KDA 8x2048": (8, 2048, 32, 32),
    "KDA 32x256": (32, 256, 32, 32),
}


def inputs(rows: int, tokens: int, key_heads: int, heads: int, decodes: int = 0) -> dict[str, Any]:
    """A call of ``rows`` requests of ``tokens`` tokens each, and of ``decodes`` of one token."""
    made: dict[str, Any] = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(0)}
    lens = torch.tensor([tokens] * rows + [1] * decodes)
    total, ints = int(lens.sum()), {"dtype": torch.int32, "device": "cuda"}
    mixed = torch.randn(total, (2 * key_heads + heads) * 128, dtype=torch.bfloat16, **made)
    q, k, v = mixed.split([key_heads * 128, key_heads * 128, heads * 128], dim=-1)
    return {
        "q": q.unflatten(-1, (key_heads, 128)),
        "k": k.unflatten(-1, (key_heads, 128)),
        "v": v.unflatten(-1, (heads, 128)),
        "g": -torch.rand(total, heads, **made) * 0.1,
        "state": torch.zeros(len(lens) + 1, heads, 128, 128, device="cuda"),
        "state_slots": torch.arange(1, len(lens) + 1, **ints),
        "seq_lens": torch.where(lens == 1, 100, lens).to(**ints),
        "query_start_loc": torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(**ints),
        "out": torch.empty(total, heads, 128, dtype=torch.bfloat16, device="cuda"),
        "beta": torch.rand(total, heads, **made),
        "max_query_len": tokens,
        "scale": 128**-0.5,
        "delta_rule": True,
        "normalize": True,
    }


def median_ms(call: Callable[[], Any], count: int) -> float:
    """Of ``count`` calls, by events."""
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(sorted(times)[count // 2], 4)


def run(name: str, ops: BackendOps, given: dict[str, Any]) -> tuple[dict[str, float], list[Tensor]]:
    """Times of one way, and what it gives."""
    given["state"].zero_()
    began = time.time()
    ops.linear_attention(**given)
    torch.cuda.synchronize()
    row = {f"{name}_first_s": round(time.time() - began, 2)}
    results = [given["out"].clone(), given["state"].clone()]
    row[f"{name}_plain"] = median_ms(lambda: ops.linear_attention(**given), 9)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.linear_attention(**given)
    graph.replay()
    row[name] = median_ms(graph.replay, 15)
    return row, results


def main() -> None:
    args = command_line(
        __doc__,
        only=("", "cases whose names have this"),
        seconds=(60.0, "no new case after that"),
        own=(False, "own kernels alone, over KDA, too"),
        output=str,
    )
    rows: list[dict[str, Any]] = []
    end = time.time() + args.seconds
    backend = "flashinfer_gdn"
    for name, sizes in (GATED_DELTA | (KIMI if args.own else {})).items():
        missing = None if args.own else get_backend(backend).unavailable()
        if args.only not in name or missing or time.time() > end:
            print(f"left out: {name} {missing or ''}", file=sys.stderr)
            continue
        given = inputs(*sizes)
        if name in KIMI:
            given["g"] = -5 * torch.rand(*given["q"].shape, device="cuda") ** 4
        row: dict[str, Any] = {"case": name, "backend": "cuda" if args.own else backend}
        own, want = run("own", BACKEND_OPS["cuda"], given)
        if args.own:
            print(json.dumps(row | own), file=sys.stderr, flush=True)
            rows.append(row | own)
            continue
        library, got = run("library", get_backend(backend).ops, given)
        pairs = zip(got, want, strict=True)
        errors = [float((x.double() - y.double()).norm() / y.double().norm()) for x, y in pairs]
        row |= own | library | {"errors": [float(f"{error:.2e}") for error in errors]}
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    write_rows(rows, args.output)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
