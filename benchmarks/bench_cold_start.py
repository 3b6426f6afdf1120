"""From a loaded model to the first token, in a process that has compiled nothing yet: one contender, one
shape, one batch size.

    # cold
    PYTHONPATH=. python benchmarks/bench_cold_start.py --shape llama-8b --contender k1+fuse+layers \\
        --save cache.tpc
    # warm
    PYTHONPATH=. python benchmarks/bench_cold_start.py --shape llama-8b --contender k1+fuse+layers \\
        --load cache.tpc

Empty cache folders make "cold" true: set TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR and TORCHPAGED_CACHE to
new ones for each run. The last line of
stdout is one JSON document: seconds of every part, their sum, and torch's cache counters.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from decode_step.cases import build_model, select_shapes
from decode_step.options import BLOCK_SIZE, DTYPES
from decode_step.own import Variant
from measuring import conditions
from torch._dynamo.utils import counters

from torchpaged.compile.compile_cache import load_compile_cache, save_compile_cache
from torchpaged.custom_ops.errors import ArgumentError, TorchpagedError
from torchpaged.engine import Generator, SamplingParams

PROMPT_TOKENS = 128
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHPAGED_CACHE")


def cold_start(
    shape: str,
    contender: str,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
    load: str = "",
    save: str = "",
) -> dict[str, Any]:
    """Measure once; the process is warm afterwards.

    Args:
        shape: a name in ``step_cases.SHAPES``.
        contender: as in `decode_step.own.Variant`; of whole steps (``k1`` ...).
        batch: requests, all with a prompt of 128 tokens; the only bucket.
        device, dtype: of the model.
        load: a compile cache to read first, inside the time.
        save: a compile cache to write afterwards, outside the time.

    Returns:
        ``seconds`` in all and by part (``load``, ``change``: fuse and compile_layers, ``generator``: pools,
        compilation and capture, ``first_token``: prefill and its token, ``second_token``, not in the sum),
        ``counters``, ``compile_cache`` reports.
    """
    from torchpaged.fuse import fuse
    from torchpaged.hf import compile_layers

    variant = Variant.parse(contender)
    if not variant.steps_per_launch:
        raise ArgumentError("contender", "one of whole steps (k1, k4 ...)", repr(contender))
    model = build_model(select_shapes([shape])[0], device, dtype)
    parts: dict[str, float] = {}
    reports: dict[str, Any] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        result = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        parts[name] = time.perf_counter() - started
        return result

    def change() -> None:
        if variant.fuse:
            fuse(model, count=False)
        if variant.compile == "layers":
            compile_layers(model)

    if load:
        reports["loaded"] = vars(timed("load", lambda: load_compile_cache(load)))
    timed("change", change)
    generator = timed(
        "generator",
        lambda: Generator(
            model,
            max_batch_size=batch,
            max_seq_len=2048,
            block_size=BLOCK_SIZE,
            buckets=[batch],
            compile=variant.compile == "compile",
            steps_per_launch=variant.steps_per_launch,
            graphs=True,
        ),
    )
    for row in range(batch):
        prompt = [(7 * row + token) % (model.config.vocab_size - 1) + 1 for token in range(PROMPT_TOKENS)]
        generator.submit(
            prompt, SamplingParams(max_new_tokens=2 + 2 * variant.steps_per_launch, ignore_eos=True)
        )
    timed("first_token", lambda: _until(generator, batch))
    seconds = sum(parts.values())
    timed("second_token", lambda: _until(generator, batch))
    if save:
        reports["saved"] = vars(save_compile_cache(save))
    kept = {
        group: dict(counters[group]) for group in ("stats", "aot_autograd", "inductor") if group in counters
    }
    return {
        "seconds": seconds,
        "parts": parts,
        "counters": kept,
        "compile_cache": reports,
        "backend": generator.choice.name,
    }


def _until(generator: Generator, tokens: int) -> None:
    """Step until that many more tokens came."""
    while tokens > 0:
        tokens -= sum(event.token_id is not None for event in generator.step())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="From a loaded model to the first token; the last line of stdout is JSON."
    )
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--contender", default="k1+fuse", help="k1, k4 ..., with +fuse, +compile or +layers")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--load", default="", help="compile cache to read first")
    parser.add_argument("--save", default="", help="compile cache to write afterwards")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    try:
        result = cold_start(
            given.shape, given.contender, given.batch, device, DTYPES[given.dtype], given.load, given.save
        )
    except TorchpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = {
        "benchmark": "cold start",
        "conditions": conditions.collect(device),
        "options": vars(given),
        "own_cache_folders": {name: name in os.environ for name in _FOLDERS},
        **result,
    }
    print(
        f"{result['seconds']:.1f} s: "
        + ", ".join(f"{name} {seconds:.2f}" for name, seconds in result["parts"].items()),
        file=sys.stderr,
    )
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
