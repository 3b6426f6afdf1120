"""An engine under a load of many requests that all come at once: output tokens per second of a first and of
later runs, what the start took, and how long requests wait.

    PYTHONPATH=. python benchmarks/bench_serving.py --shape llama-1b [--requests 256] [--runs 2]
        [--options '{"mixed_steps": false}'] [--output FILE]

Prompts and outputs have 100 to 1,024 tokens, drawn anew for every run, so that nothing is found in a prefix
cache; weights are random; temperature 0.6. ``first_run`` of a process with empty folders for kernels
(TORCHPAGED_CACHE, TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR) is a cold one. Seconds, but for ``tok_per_s``;
the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from decode_step.cases import build_model, select_shapes

from torchpaged.bench import conditions
from torchpaged.engine import Generator, SamplingParams

SHORTEST, LONGEST = 100, 1024


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def load_of(count: int, vocab: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests: token ids and how to go on."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        prompt = [rng.randrange(1, vocab) for _ in range(rng.randint(SHORTEST, LONGEST))]
        length = rng.randint(SHORTEST, LONGEST)
        made.append((prompt, SamplingParams(length, temperature=0.6, ignore_eos=True, seed=index)))
    return made


def run(generator: Generator, load: list[tuple[list[int], SamplingParams]]) -> dict[str, Any]:
    """Submit all, read all events."""
    before = dataclasses.asdict(generator.stats)
    start = time.perf_counter()
    last: dict[int, float] = {}
    firsts, gaps = [], []
    for prompt, sampling in load:
        generator.submit(prompt, sampling)
    submitted = time.perf_counter() - start
    for event in generator.stream():
        now = time.perf_counter()
        if event.request_id in last:
            gaps.append(now - last[event.request_id])
        else:
            firsts.append(now - start)
        last[event.request_id] = now
    took = time.perf_counter() - start
    after = dataclasses.asdict(generator.stats)
    names = (
        "prefill_seconds",
        "decode_seconds",
        "steps",
        "passes",
        "mixed_steps",
        "late_compiles",
        "preemptions",
    )
    return {
        "tok_per_s": sum(sampling.max_new_tokens for _, sampling in load) / took,
        "seconds": took,
        "submit": submitted,
        "first_token": {"p50": statistics.median(firsts), "p99": percentile(firsts, 0.99)},
        "between_tokens": {"p50": statistics.median(gaps), "p99": percentile(gaps, 0.99), "max": max(gaps)},
        **{name: after[name] - before[name] for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--options", type=json.loads, default={}, help="of the Generator, as JSON")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = select_shapes([args.shape])[0]
    model = build_model(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    options: dict[str, Any] = {
        "max_batch_size": 256,
        "max_seq_len": 2 * LONGEST,
        "fuse": True,
        **args.options,
    }
    generator = Generator(model, **options)
    report = generator.start_report
    print(report, flush=True)
    runs = []
    for number in range(args.runs):
        runs.append(run(generator, load_of(args.requests, shape.vocab_size, number)))
        print(json.dumps(runs[-1]), flush=True)
    document = {
        "benchmark": "serving",
        "shape": args.shape,
        "requests": args.requests,
        "options": options,
        "start": report.seconds,
        "start_phases": [dataclasses.asdict(phase) for phase in report.phases],
        "runs": runs,
        "conditions": conditions.collect(device),
    }
    if args.output:
        args.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
