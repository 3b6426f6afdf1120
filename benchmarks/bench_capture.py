"""What graphs cost and give around a decode step: capture of many buckets, and prefill steps with and without a graph.

    PYTHONPATH=. python benchmarks/bench_capture.py --shape llama-8b --buckets 24 --output capture.json
    PYTHONPATH=. python benchmarks/bench_capture.py --shape tiny --buckets 3 --prefill 16 --dtype fp32      # any machine

Random weights, fused layers, whole steps with sampling in the graph. Buckets: milliseconds of warm-up and capture and MiB each, largest
first, and what all of them take together. Prefill: milliseconds of one prompt of so many tokens, launched from Python as the engine does
it, and replayed from a graph of exactly that shape; where both agree a graph would win nothing. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torchpaged.bench import conditions
from torchpaged.bench.step_cases import build_model, select_shapes
from torchpaged.bench.step_options import BLOCK_SIZE, DTYPES
from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.graphs import bucket_table
from torchpaged.hf import PagedModel, fuse
from torchpaged.metadata import AttentionMetadata


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes that torch has reserved, and bytes of the device in use."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_reserved(device), total - free


def measure_buckets(model: PagedModel, count: int, steps: int) -> dict[str, Any]:
    """Capture ``count`` buckets of 1, 2, 4 and multiples of 8 rows."""
    buckets = [1, 2, 4, *range(8, 8 * count, 8)][:count]
    loop = DecodeLoop(model, max_batch_size=buckets[-1], max_blocks_per_req=128, steps_per_launch=steps, buckets=buckets, compile=False)
    largest = loop.rows.view(buckets[-1])
    with torch.inference_mode(), loop.rows.padding(buckets[-1]):
        model(*largest)  # kernels are loaded and the working memory of a step exists, with graphs or without
    torch.cuda.empty_cache()
    before, started = memory(loop.rows.device), time.perf_counter()
    loop.runner.capture()
    seconds, after = time.perf_counter() - started, memory(loop.rows.device)
    reports = loop.runner.report()
    print(bucket_table(reports))
    taken = [round((now - then) / 2**20, 1) for now, then in zip(after, before, strict=True)]
    print(
        f"{count} buckets, {steps} steps each: {seconds:.2f} s, {taken[0]} MiB reserved by torch, {taken[1]} MiB of the device", flush=True
    )
    return {
        "steps_per_launch": steps,
        "seconds": seconds,
        "reserved_mib": taken[0],
        "device_mib": taken[1],
        "buckets": [asdict(r) for r in reports],
    }


def median_ms(call: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Wall milliseconds per call, calls queued back to back as the engine queues them; the median of three rounds."""
    rounds = []
    for _ in range(3):
        memory(device)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        memory(device)
        rounds.append((time.perf_counter() - start) * 1e3 / repeats)
    return statistics.median(rounds)


@torch.inference_mode()
def measure_prefill(model: PagedModel, tokens: int) -> dict[str, Any]:
    """One prompt of ``tokens``, from Python and from a graph."""
    device, blocks = torch.device(model.device), list(range(1, 1 + -(-tokens // BLOCK_SIZE)))
    ids = torch.randint(0, model.vocab_size, (tokens,), device=device)
    metadata = AttentionMetadata.from_lists([tokens], [tokens], [blocks], block_size=BLOCK_SIZE, device=device)
    last = torch.tensor([tokens - 1], device=device)

    def step() -> torch.Tensor:
        return model(ids, metadata, last)

    for _ in range(3):
        want = step()
    result = {"tokens": tokens, "python_ms": median_ms(step, device)}
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step()
        graph.replay()
        torch.testing.assert_close(got, want)
        result["graph_ms"] = median_ms(graph.replay, device)
    print(result, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--dtype", default="bf16", help=", ".join(DTYPES))
    parser.add_argument("--buckets", type=int, default=24)
    parser.add_argument("--steps", type=lambda text: [int(n) for n in text.split(",")], default=[1], help="steps per launch")
    parser.add_argument(
        "--prefill", type=lambda text: [int(n) for n in text.split(",")], default=[64, 512, 2048], help="tokens of a prompt"
    )
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(select_shapes([args.shape])[0], device, DTYPES[args.dtype])
    fuse(model, count=False)
    paged = PagedModel(model, num_blocks=2 + max(args.prefill) // BLOCK_SIZE, block_size=BLOCK_SIZE)
    result: dict[str, Any] = {"benchmark": "capture", "conditions": conditions.collect(device), "shape": args.shape, "dtype": args.dtype}
    result["captures"] = [measure_buckets(paged, args.buckets, steps) for steps in args.steps]
    result["prefill"] = [measure_prefill(paged, tokens) for tokens in args.prefill]
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
