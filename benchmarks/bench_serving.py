"""An engine under load: output tokens per second where all requests come at once, in a first and in later
runs; what the start took; and how long requests wait where they come at a rate.

    PYTHONPATH=. python benchmarks/bench_serving.py --shape llama-1b [--lengths uniform] [--requests 256]
        [--runs 2] [--rows 256] [--shares 0.25,0.5,0.75] [--span 12] [--options '{"mixed_steps": false}']
        [--output FILE]

``uniform``: prompts and outputs of 100 to 1,024 tokens. ``sharegpt``: log-normal lengths with the means of
the conversations that serving benchmarks draw from ShareGPT, 215 and 198 tokens, at most 1,024. ``prompts``:
2,048 tokens and one token of output. Keys and values of ``--rows`` requests of 2,176 tokens have room, unless
the options say ``num_blocks``: at 8B 2 MiB each, 68 GiB with 256 rows. Each run
draws anew, so that nothing is found in a prefix cache; weights are random; temperature 0.6. After the runs of
one kind of lengths, requests come at each of ``--shares`` of the requests per second that the last run
served, by a Poisson process, for about ``--span`` seconds. The first run of a process with empty folders for
kernels (TORCHPAGED_CACHE, TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR) is a cold one. Seconds, but for
``tok_per_s`` and ``rate`` (requests per second); ``by_kind``: where they went (`serving.steps`). Each row is
printed, and the document written, as soon as it is measured.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from decode_step.cases import ModelShape, select_shapes
from documents import command_line, keep
from measuring import conditions
from serving.engines import OwnEngine, serve
from serving.loads import LONGEST, load_of, prompts_of
from serving.steps import Steps

#: Tokens of a prompt alone, and of a prompt and an output of the longest load.
PROMPT = 2 * LONGEST


def measure(
    engine: OwnEngine, args: argparse.Namespace, shape: ModelShape, rows: list[dict[str, Any]]
) -> None:
    """Runs of all requests at once, then the rates, each into ``rows``."""

    def add(lengths: str, count: int, rate: float | None, **names: Any) -> None:
        vocab, seed, steps = shape.vocab_size, len(rows), Steps() if rate is None else None
        prompts = lengths == "prompts"
        load = prompts_of(count, PROMPT, vocab, seed) if prompts else load_of(lengths, count, vocab, seed)
        row = {"lengths": lengths, **names, **serve(engine, load, rate, steps)}
        rows.append(row if steps is None else {**row, "by_kind": steps.table(shape)})
        print(json.dumps(rows[-1]), flush=True)
        write(engine, args, rows)

    for lengths, count in zip(args.lengths, args.requests, strict=True):
        for _ in range(args.runs):
            add(lengths, count, None)
        served = rows[-1]["requests_per_s"]
        for share in args.shares:
            add(lengths, max(8, round(served * share * args.span)), served * share, share=share)


def write(engine: OwnEngine, args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    document = {"benchmark": "serving", "shape": args.shape, "rows": args.rows, **engine.start, "runs": rows}
    keep(document | {"conditions": conditions.collect(engine.generator.device)}, args.output)


def main() -> None:
    args = command_line(
        __doc__,
        shape="llama-1b",
        lengths=(["uniform"], "uniform, sharegpt, prompts"),
        requests=([256], "one count for each of --lengths"),
        runs=2,
        rows=(256, "requests that run at once"),
        shares=[float],
        span=(12.0, "seconds of arrivals at each of --shares"),
        options={"type": json.loads, "default": {}, "help": "of the Generator, as JSON"},
        output=Path,
    )
    shape = select_shapes([args.shape])[0]
    engine = OwnEngine(shape, args.rows, PROMPT + 128, args.options)
    print(json.dumps(engine.start), flush=True)
    print(engine.generator.start_report, flush=True)
    measure(engine, args, shape, [])


if __name__ == "__main__":
    main()
