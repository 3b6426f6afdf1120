"""What one process measures of one engine and shape; every row is written as it comes.

A process is killed at the end of its time, so nothing here waits for the end to write.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode_step.cases import select_shapes

from serving.engines import ENGINES, Engine, finish, serve
from serving.loads import LONGEST, load_of, prompts_of

PARTS = ("uniform", "prompts", "sharegpt", "rates")


@dataclass(frozen=True)
class Case:
    """One process: an engine, a shape, and parts of `PARTS` in turn.

    Attributes:
        began: `time.time` when the process was started, which ``ready_s`` counts from.
        options: of the engine; those of `serving.engines` otherwise.
        requests: of "uniform"; of "sharegpt" four times as many.
        longest: tokens of a prompt and of an output, at most.
        prompt_tokens, prompt_counts: of "prompts": each count of prompts of so many tokens waits at once.
        served: requests per second that "rates" takes shares of; 0: what "sharegpt" served in this process.
        span: seconds of arrivals at each of ``shares``.
    """

    engine: str
    shape: str
    parts: tuple[str, ...]
    rows_file: str
    began: float
    options: dict[str, Any]
    rows: int = 256
    requests: int = 256
    longest: int = LONGEST
    prompt_tokens: int = 2048
    prompt_counts: tuple[int, ...] = (8, 64)
    served: float = 0.0
    shares: tuple[float, ...] = (0.25, 0.5, 0.75)
    span: float = 10.0


def measure(case: Case) -> None:
    """Start the engine and run the parts; rows are appended to ``case.rows_file``, one JSON object a line."""
    shape = select_shapes([case.shape])[0]
    vocab, served, seed = shape.vocab_size, case.served, 0
    max_seq_len = max(2 * case.longest, case.prompt_tokens) + 128
    engine: Engine = ENGINES[case.engine](shape, case.rows, max_seq_len, case.options)

    def add(part: str, **row: Any) -> dict[str, Any]:
        nonlocal seed
        seed += 1  # nothing of a load is in the prefix cache
        row = {"engine": case.engine, "shape": case.shape, "part": part, **row}
        with Path(case.rows_file).open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        return row

    add("start", ready_s=time.time() - case.began, **engine.start)
    for part in case.parts:
        if part == "uniform":
            for run in ("first", "second"):
                add(part, run=run, **finish(engine, load_of(part, case.requests, vocab, seed, case.longest)))
        elif part == "prompts":
            for count in case.prompt_counts:
                for run in ("first", "second"):
                    load = prompts_of(count, case.prompt_tokens, vocab, seed)
                    add(part, run=run, **finish(engine, load))
        elif part == "sharegpt":
            load = load_of(part, 4 * case.requests, vocab, seed, case.longest)
            served = add(part, run="first", **finish(engine, load))["requests_per_s"]
            served = case.served or served
        else:
            for share in case.shares:
                rate = served * share
                load = load_of("sharegpt", max(8, round(rate * case.span)), vocab, seed, case.longest)
                add(part, share=share, **serve(engine, load, rate))
