"""Prompts of gated delta nets: the device's own kernels against FlashInfer's, on one GPU.

    PYTHONPATH=. python benchmarks/bench_state_prompts.py [--only TEXT] [--own] [--segments] [--seconds 60]
        [--output FILE]

Inputs are a model's: slices of what its convolution gives, queries and keys to be normalised, requests
without a past. ``own``, ``library``: ms of a call as a graph, medians of 15 replays; ``..._plain``: called
without one; ``first_s``: seconds of the library's first call, in which it compiles; ``errors``: of out and
states between the two. ``--own``: own kernels alone, over Kimi delta attention, too; ``kernels``: us of
each in a call without a graph. ``--segments``: own kernels alone over gated delta nets, long rows as wholes
and cut into segments of so many tokens; ``chosen``: what the device's kernels take. The last line is one JSON
document.
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
from torchpaged.custom_ops.state.call import LinearAttentionCall
from torchpaged.custom_ops.state.cuda import delta_pass
from torchpaged.custom_ops.state.triton import chunks

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
#: The same where rows may be cut: a row or two of 8 to 64 heads, and more rows of few.
FEW_HEADS = {
    f"{rows}x{tokens}, {heads} heads": (rows, tokens, heads // 4, heads)
    for rows, heads, tokens in (
        *((1, heads, tokens) for heads in (8, 16, 32) for tokens in (2048, 3072, 4096, 8192)),
        *((rows, 8, tokens) for rows in (2, 4) for tokens in (2048, 8192)),
        (1, 8, 32768),
        (1, 16, 32768),
    )
}
SEGMENTS = (512, 1024, 2048, 4096, 8192)
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


def kernels(ops: BackendOps, given: dict[str, Any]) -> dict[str, float]:
    """Medians of each kernel's us, in a call's order; what comes twice in a call has a number behind it."""
    kind, calls = torch.autograd.DeviceType.CUDA, 7
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            ops.linear_attention(**given)
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == kind]
    events.sort(key=lambda event: event.time_range.start)
    row: dict[str, float] = {}
    for n in range(len(events) // calls):
        times = sorted(event.device_time for event in events[n :: len(events) // calls])
        name = events[n].name
        row[f"{name} {n}" if name in row else name] = round(times[calls // 2], 1)
    return row


def segments(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Times of long rows as wholes and in segments."""
    call, tiles = LinearAttentionCall(**given), chunks.tiles
    row: dict[str, Any] = {"case": name, "chosen": tiles(call, delta_pass.CUT).segment}
    longest = int(given["max_query_len"])
    try:
        for segment in (None, *(n for n in SEGMENTS if n < longest)):
            chunks.tiles = lambda call, *_, n=segment: tiles(call)._replace(segment=n)
            times, _ = run("own", BACKEND_OPS["cuda"], given)
            row["whole" if segment is None else str(segment)] = times["own"]
    finally:
        chunks.tiles = tiles
    return row


def main() -> None:
    args = command_line(
        __doc__,
        only=("", "cases whose names have this"),
        seconds=(60.0, "no new case after that"),
        own=(False, "own kernels alone, over KDA, too"),
        segments=(False, "lengths of own kernels' segments"),
        output=str,
    )
    rows: list[dict[str, Any]] = []
    end = time.time() + args.seconds
    backend = "flashinfer_gdn"
    cases = FEW_HEADS if args.segments else GATED_DELTA | (KIMI if args.own else {})
    for name, sizes in cases.items():
        missing = None if args.own or args.segments else get_backend(backend).unavailable()
        if args.only not in name or missing or time.time() > end:
            print(f"left out: {name} {missing or ''}", file=sys.stderr)
            continue
        given = inputs(*sizes)
        if args.segments:
            rows.append(segments(name, given))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            continue
        if name in KIMI:
            given["g"] = -5 * torch.rand(*given["q"].shape, device="cuda") ** 4
        row: dict[str, Any] = {"case": name, "backend": "cuda" if args.own else backend}
        own, want = run("own", BACKEND_OPS["cuda"], given)
        if args.own:
            rows.append(row | own | {"kernels": kernels(BACKEND_OPS["cuda"], given)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
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
