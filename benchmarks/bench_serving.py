"""An engine under load: output tokens per second where all requests come at once, in a first and in later
runs; what the start took; and how long requests wait where they come at a rate.

    PYTHONPATH=. python benchmarks/bench_serving.py --shape llama-1b [--lengths uniform] [--requests 256]
        [--runs 2] [--shares 0.25,0.5,0.75] [--options '{"mixed_steps": false}'] [--output FILE]

``uniform``: prompts and outputs of 100 to 1,024 tokens. ``sharegpt``: log-normal lengths with the means of
the conversations that serving benchmarks draw from ShareGPT, 215 and 198 tokens, at most 1,024. Each run
draws anew, so that nothing is found in a prefix cache; weights are random; temperature 0.6. After the runs of
one kind of lengths, requests come at each of ``--shares`` of the requests per second that the last run
served, by a Poisson process, for about ``SPAN`` seconds. The first run of a process with empty folders for
kernels (TORCHPAGED_CACHE, TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR) is a cold one. Seconds, but for
``tok_per_s`` and ``rate`` (requests per second); the last line is one JSON document.
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
#: Seconds of arrivals at each rate.
SPAN = 12
#: Medians and deviations of the logarithm of lengths whose means, cut at `LONGEST`, are 215 and 198.
LOG_NORMAL = {"prompt": (114.5, 1.25), "output": (124.5, 1.0)}
COUNTED = (
    "prefill_seconds",
    "decode_seconds",
    "steps",
    "passes",
    "mixed_steps",
    "late_compiles",
    "preemptions",
)


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def spread(values: list[float]) -> dict[str, float]:
    return {
        "p50": statistics.median(values),
        "p99": percentile(values, 0.99),
        "max": max(values),
    }


def length_of(rng: random.Random, lengths: str, part: str) -> int:
    if lengths == "uniform":
        return rng.randint(SHORTEST, LONGEST)
    median, deviation = LOG_NORMAL[part]
    return min(LONGEST, max(4, round(median * 2.718281828 ** (deviation * rng.gauss(0, 1)))))


def load_of(lengths: str, count: int, vocab: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests: token ids and how to go on."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        prompt = [rng.randrange(1, vocab) for _ in range(length_of(rng, lengths, "prompt"))]
        length = length_of(rng, lengths, "output")
        made.append((prompt, SamplingParams(length, temperature=0.6, ignore_eos=True, seed=index)))
    return made


def run(
    generator: Generator, load: list[tuple[list[int], SamplingParams]], rate: float | None = None
) -> dict[str, Any]:
    """Submit each at its time (``rate`` None: all at once), read all events."""
    rng = random.Random(len(load))
    arrivals = [0.0] * len(load)
    for index in range(1, len(load) if rate else 0):
        arrivals[index] = arrivals[index - 1] + rng.expovariate(rate)
    before = dataclasses.asdict(generator.stats)
    start = time.perf_counter()
    came: dict[int, float] = {}
    last: dict[int, float] = {}
    firsts, gaps, submitted = [], [], 0
    while submitted < len(load) or generator.has_unfinished:
        now = time.perf_counter() - start
        while submitted < len(load) and arrivals[submitted] <= now:
            came[generator.submit(*load[submitted])] = arrivals[submitted]
            submitted += 1
        if not generator.has_unfinished:
            time.sleep(max(0.0, arrivals[submitted] - now))
            continue
        events = generator.step()
        now = time.perf_counter() - start
        for event in events:
            if event.request_id in last:
                gaps.append(now - last[event.request_id])
            else:
                firsts.append(now - came[event.request_id])
            last[event.request_id] = now
    took = time.perf_counter() - start
    after = dataclasses.asdict(generator.stats)
    return {
        "requests": len(load),
        "rate": rate,
        "tok_per_s": sum(sampling.max_new_tokens for _, sampling in load) / took,
        "seconds": took,
        "first_token": spread(firsts),
        "between_tokens": spread(gaps),
        **{name: after[name] - before[name] for name in COUNTED},
    }


def measure(generator: Generator, args: argparse.Namespace, vocab: int) -> list[dict[str, Any]]:
    """Runs of all requests at once, then the rates."""
    rows: list[dict[str, Any]] = []

    def add(lengths: str, count: int, rate: float | None, **names: Any) -> None:
        load = load_of(lengths, count, vocab, len(rows))
        rows.append({"lengths": lengths, **names, **run(generator, load, rate)})
        print(json.dumps(rows[-1]), flush=True)

    for lengths, count in zip(args.lengths, args.requests, strict=True):
        for _ in range(args.runs):
            add(lengths, count, None)
        served = count / rows[-1]["seconds"]
        for share in args.shares:
            add(lengths, max(8, round(served * share * SPAN)), served * share, share=share)
    return rows


def numbers(kind: Any) -> Any:
    return lambda text: [kind(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--lengths", type=numbers(str), default=["uniform"], help="uniform, sharegpt")
    parser.add_argument(
        "--requests", type=numbers(int), default=[256], help="one count for each of --lengths"
    )
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--shares", type=numbers(float), default=[])
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
    document = {
        "benchmark": "serving",
        "shape": args.shape,
        "options": options,
        "start": report.seconds,
        "start_phases": [dataclasses.asdict(phase) for phase in report.phases],
        "runs": measure(generator, args, shape.vocab_size),
        "conditions": conditions.collect(device),
    }
    if args.output:
        args.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
