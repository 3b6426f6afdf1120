"""What graphs cost and give around a decode step: capture of many buckets, and prefill steps with and without
a graph.

    PYTHONPATH=. python benchmarks/bench_capture.py --shape llama-8b --buckets 24 --output capture.json
    # any machine
    PYTHONPATH=. python benchmarks/bench_capture.py --shape tiny --buckets 3 --prefill 16 \\
        --first-token 16 --dtype fp32

Random weights, fused layers, whole steps with sampling in the graph. Buckets: milliseconds of warm-up and
capture and MiB each, largest first, and what all of them take together. Prefill: milliseconds of a step of so
many prompt tokens, of one request and of several, with all host work, launched from Python and replayed from
the engine's graph of a bucket of that size; where both agree a graph wins nothing. First token: milliseconds
from a prompt's submission to its first token, both ways. The last line is one JSON document.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from decode_step.cases import build_model, select_shapes
from decode_step.options import BLOCK_SIZE, DTYPES
from documents import command_line, finish
from measuring import conditions

from torchpaged.engine import Generator, SamplingParams
from torchpaged.engine.decode_loop import DecodeLoop, decode_rows
from torchpaged.engine.outputs import TextStream
from torchpaged.engine.packed_steps import PackedSteps
from torchpaged.engine.sequence import Sequence
from torchpaged.engine.step_graphs import PrefillGraphs
from torchpaged.graphs import bucket_table
from torchpaged.graphs.buckets import default_prefill_buckets
from torchpaged.hf import PagedModel, fuse

MAX_SEQ_LEN = 2048


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
    loop = DecodeLoop(model, decode_rows(model, buckets[-1], 128, steps), buckets=buckets, compile=False)
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
        (
            f"{count} buckets, {steps} steps each: {seconds:.2f} s, {taken[0]} MiB reserved by torch, "
            f"{taken[1]} MiB of the device"
        ),
        flush=True,
    )
    return {
        "steps_per_launch": steps,
        "seconds": seconds,
        "reserved_mib": taken[0],
        "device_mib": taken[1],
        "buckets": [asdict(r) for r in reports],
    }


def median_ms(call: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Wall milliseconds per call, calls queued back to back as the engine queues them; the median of
    three rounds."""
    rounds = []
    for _ in range(3):
        memory(device)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        memory(device)
        rounds.append((time.perf_counter() - start) * 1e3 / repeats)
    return statistics.median(rounds)


def chunks_of(model: PagedModel, tokens: int, requests: int) -> list[tuple[Sequence, int]]:
    """A prefill step of ``tokens`` prompt tokens, shared by as many requests."""
    rng, chunks, block = random.Random(tokens), [], 1
    for index in range(requests):
        count = tokens // requests + (index < tokens % requests)
        prompt = [rng.randrange(model.vocab_size) for _ in range(count)]
        sequence = Sequence(index, prompt, SamplingParams(), 0, TextStream(None, ()), count + 1)
        sequence.blocks = list(range(block, block + -(-count // BLOCK_SIZE)))
        block += len(sequence.blocks)
        chunks.append((sequence, count))
    return chunks


@torch.inference_mode()
def measure_prefill(model: PagedModel, tokens: int, requests: int) -> dict[str, Any]:
    """One prefill step, host work included, both ways of the engine: launched from Python and replayed from a
    graph of ``tokens``."""
    device, chunks, reqs = (torch.device(model.device), chunks_of(model, tokens, requests), max(8, requests))
    rows = decode_rows(model, reqs, -(-MAX_SEQ_LEN // BLOCK_SIZE))
    graphs = PrefillGraphs(model, rows, [tokens], required=True, reason="measured")
    python, replayed = PackedSteps(model, rows), PackedSteps(model, rows, graphs)
    result: dict[str, Any] = {"tokens": tokens, "requests": requests}
    for _ in range(3):
        want = python.prefill(chunks)
    got = replayed.prefill(chunks)
    scale = want.float().abs().max()
    result["largest_difference"] = float((got.float() - want.float()).abs().max() / scale)
    result["python_ms"] = median_ms(lambda: python.prefill(chunks), device)
    result["graph_ms"] = median_ms(lambda: replayed.prefill(chunks), device)
    runner = next(runner for runner in graphs.runners if runner.fits(requests, tokens))
    result |= {
        "capture_ms": runner.report()[0].capture_ms,
        "capture_mib": runner.report()[0].num_bytes / 2**20,
    }
    print({name: round(value, 4) for name, value in result.items()}, flush=True)
    return result


def measure_first_token(model: PagedModel, tokens: int, repeats: int = 10) -> dict[str, Any]:
    """Milliseconds from the submission of one prompt to its first token, through a `Generator`, with prefill
    graphs and without."""
    result: dict[str, Any] = {"tokens": tokens}
    for name, buckets in (("python_ms", None), ("graph_ms", default_prefill_buckets(tokens))):
        generator = Generator(
            model,
            max_batch_size=1,
            max_seq_len=MAX_SEQ_LEN,
            prefill_chunk_size=tokens,
            prefill_buckets=buckets,
            compile=False,
        )
        rng, times = random.Random(tokens), []
        for _ in range(repeats + 2):  # two for warm-up
            prompt = [rng.randrange(model.vocab_size) for _ in range(tokens)]
            start = time.perf_counter()
            generator.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))
            times.append((time.perf_counter() - start) * 1e3)
        result[name] = statistics.median(times[2:])
    print(f"first token: {result}", flush=True)
    return result


def main() -> None:
    args = command_line(
        __doc__,
        shape="llama-8b",
        dtype=("bf16", ", ".join(DTYPES)),
        buckets=24,
        steps=([1], "steps per launch"),
        prefill=([16, 64, 256, 512, 1024, 2048], "prompt tokens of a step"),
        requests=([1, 4], "requests that share them"),
        first_token=([64, 512], "tokens of a prompt"),
        output="",
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(select_shapes([args.shape])[0], device, DTYPES[args.dtype])
    fuse(model, count=False)
    paged = PagedModel(
        model,
        num_blocks=2 + max(*args.prefill, MAX_SEQ_LEN) // BLOCK_SIZE + max(args.requests),
        block_size=BLOCK_SIZE,
    )
    result: dict[str, Any] = {
        "benchmark": "capture",
        "conditions": conditions.collect(device),
        "shape": args.shape,
        "dtype": args.dtype,
    }
    result["captures"] = [measure_buckets(paged, args.buckets, steps) for steps in args.steps]
    result["prefill"] = [
        measure_prefill(paged, tokens, requests) for requests in args.requests for tokens in args.prefill
    ]
    result["first_token"] = [measure_first_token(paged, tokens) for tokens in args.first_token]
    finish(result, args.output)


if __name__ == "__main__":
    main()
