"""sample_tokens on a GPU: greedy, plain and truncated rows, against torch.argmax and a sampler that sorts.

    PYTHONPATH=. python benchmarks/bench_sampling.py [--rows 1,8,64] [--vocab 128256]
        [--cases greedy,top_k_top_p] [--dtype bf16]

A correctness gate runs before every timing. Each round is one CUDA graph over several sets of logits,
replayed back to back, the contenders in turns; figures are microseconds per call. Logits come from the L2
cache, as a projection leaves them: they are normal numbers of the given spread, "peaked" ones to the third
power / 8, so that a few tokens hold most of the mass, as in a language model. The last line is one
JSON document.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from documents import command_line
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from measuring import conditions
from measuring.timing import CudaSampler, interleave
from op_inputs.sampling import assert_samples_close, make_accept_inputs, make_sampling_inputs

from torchpaged.custom_ops import BACKEND_OPS

TRITON = BACKEND_OPS["triton"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SETS = 16

#: Name -> (parameters of every row, peaked logits).
CASES: dict[str, tuple[dict[str, float], bool]] = {
    "greedy": ({"temperature": 0.0}, True),
    "greedy_penalty": ({"temperature": 0.0, "repetition_penalty": 1.1}, True),
    "temperature": ({"temperature": 0.8}, True),
    "top_k": ({"top_k": 50}, True),
    "top_k_top_p": ({"temperature": 0.8, "top_k": 50, "top_p": 0.9}, True),
    "top_p": ({"temperature": 0.8, "top_p": 0.9}, True),
    "min_p": ({"min_p": 0.05}, True),
    "top_k_1000_flat": ({"top_k": 1000}, False),
    "top_p_flat": ({"top_p": 0.9}, False),
}


def sort_and_sample(inputs: dict[str, Tensor]) -> Tensor:
    """The usual sampler in torch calls: a sort, two masks, an exponential race."""
    z, order = (inputs["logits"].float() / inputs["temperature"][:, None]).sort(dim=-1, descending=True)
    rank = torch.arange(z.shape[1], device=z.device)[None]
    top_k = torch.where(inputs["top_k"] == 0, z.shape[1], inputs["top_k"])
    probabilities = z.masked_fill(rank >= top_k[:, None], float("-inf")).softmax(-1)
    kept = probabilities.cumsum(-1) - probabilities < inputs["top_p"][:, None]
    race = torch.where(kept, probabilities, 0.0) / torch.empty_like(probabilities).exponential_()
    return order.gather(1, race.argmax(-1, keepdim=True))


def measure(case: str, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one case at one batch size."""
    row, peaked = CASES[case]
    sets = []
    for seed in range(max(2, min(SETS, 64 // rows))):
        inputs = make_sampling_inputs(
            [row] * rows, vocab_size=args.vocab, dtype=DTYPES[args.dtype], device="cuda", seed=seed
        )
        if peaked:
            inputs["logits"] = (inputs["logits"].float() ** 3 / 8).to(DTYPES[args.dtype])
        sets.append(inputs)
    assert_samples_close(TRITON, sets[0])
    contenders: dict[str, Callable[[dict[str, Tensor]], Any]] = {
        "sample_tokens": lambda inputs: TRITON.sample_tokens(**inputs)
    }
    if row.get("temperature") == 0.0:
        contenders["torch.argmax"] = lambda inputs: inputs["logits"].argmax(-1)
    else:
        contenders["sort"] = sort_and_sample
    samplers = {
        name: CudaSampler([partial(run, inputs) for inputs in sets]) for name, run in contenders.items()
    }
    timings = interleave(samplers, args.repeats)
    return {
        "case": case,
        "rows": rows,
        "sets": len(sets),
        "timings": {name: asdict(timing) for name, timing in timings.items()},
    }


def measure_accept(rows: int, repeats: int) -> dict[str, Any]:
    """accept_tokens. Rows end after a few replays, which takes loads out of a kernel that waits for its first
    ones most of the time."""
    sets = [
        make_accept_inputs(rows, vocab_size=128256, num_stops=4, device="cuda", seed=seed)
        for seed in range(SETS)
    ]
    samplers = {"accept_tokens": CudaSampler([partial(TRITON.accept_tokens, **inputs) for inputs in sets])}
    timings = interleave(samplers, repeats)
    return {
        "case": "accept",
        "rows": rows,
        "sets": SETS,
        "timings": {name: asdict(timing) for name, timing in timings.items()},
    }


def main() -> None:
    args = command_line(
        __doc__,
        rows=[1, 8, 64],
        vocab=128256,
        dtype={"choices": DTYPES, "default": "bf16"},
        cases=(list(CASES), ", ".join(CASES)),
        repeats=40,
    )
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    result: dict[str, Any] = {
        "conditions": conditions.collect(torch.device("cuda")),
        "vocab_size": args.vocab,
        "dtype": args.dtype,
        "rows": [],
    }
    print(f"vocabulary {args.vocab}, {args.dtype}; us per call")
    for rows in args.rows:
        measured = [partial(measure, case, rows, args) for case in args.cases] + [
            partial(measure_accept, rows, args.repeats)
        ]
        for call in measured:
            row = call()
            result["rows"].append(row)
            figures = "  ".join(
                f"{name} {timing['median_us']:.2f}" for name, timing in row["timings"].items()
            )
            print(f"B={rows:<4} {row['case']:<16} {figures}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
