"""What ``generate()`` costs per token, by the host's clock: transformers' own fast path, our caches, the
accelerated model.

    PYTHONPATH=. python benchmarks/bench_generate.py --output generate.json
    # any machine
    PYTHONPATH=. python benchmarks/bench_generate.py --shape tiny --batches 1,2 --prompt 32 --new 8 \\
        --dtype fp32
    # beams, beside the cache that transformers takes by default, too
    PYTHONPATH=. python benchmarks/bench_generate.py --batches 1 --beams 10 --prompt 512 --new 400 \\
        --only "own cache;static cache;PagedCache"

Random weights. Of each way two calls are timed, of one new token and of ``--new``; their difference over the
tokens between them is the figure, the best of ``--repeats``. Compiling and capturing stay out. In float32 the
tokens of every way must be those of the first one; in bfloat16 their share is in the document. The last line
is one JSON document.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from decode_step.cases import build_model, select_shapes
from decode_step.options import DTYPES
from documents import command_line, keep
from measuring import conditions
from torch import Tensor

import torchpaged.hf as hf

Call = Callable[[Tensor, int], Tensor]


def plain(model: Any, beams: int, **options: Any) -> Call:
    """``generate()`` as it is, greedy or with beams, without an end."""

    def call(prompts: Tensor, new: int) -> Tensor:
        return model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new,
            do_sample=False,
            num_beams=beams,
            eos_token_id=None,
            pad_token_id=0,
            **{name: value(prompts) if callable(value) else value for name, value in options.items()},
        )

    return call


def with_paged_cache(model: Any, beams: int, most: int) -> Call:
    """With one `PagedCache` for all calls of a batch size; the decode step is compiled by generate()."""
    caches: dict[int, Any] = {}

    def cache(prompts: Tensor) -> Any:
        rows = len(prompts) * beams
        if rows not in caches:
            caches[rows] = hf.PagedCache(model.config, max_batch_size=rows, max_seq_len=most)
        made = caches[rows]
        made.reset()
        return made

    return plain(model, beams, past_key_values=cache)


def measure(call: Call, prompts: Tensor, new: int, repeats: int) -> dict[str, Any]:
    """Milliseconds per token; and the tokens."""

    def seconds(tokens: int) -> tuple[float, Tensor]:
        if prompts.is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        out = call(prompts, tokens)
        if prompts.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started, out

    first, _ = seconds(new)
    call(prompts, 1)
    ones = [seconds(1)[0] for _ in range(repeats)]
    manys = [seconds(new) for _ in range(repeats)]
    many = min(taken for taken, _ in manys)
    return {
        "ms": (many - min(ones)) / (new - 1) * 1e3,
        "ms_first_token": min(ones) * 1e3,
        "ms_whole_call": many * 1e3,
        "first_run_s": first,
        "tokens": manys[-1][1][:, prompts.shape[1] :].tolist(),
    }


def ways(model: Any, most: int, batches: list[int], beams: int) -> list[tuple[str, Callable[[], Call]]]:
    """Name and set-up of each way, in an order in which each finds the model as it needs it."""

    def own(**options: Any) -> Call:
        model.set_attn_implementation("sdpa")
        return plain(model, beams, **options)

    def paged(fused: bool) -> Call:
        torch.compiler.reset()
        model.set_attn_implementation("torchpaged")
        if fused:
            hf.fuse(model, count=False)
        return with_paged_cache(model, beams, most)

    def accelerated() -> Call:
        torch.compiler.reset()
        hf.accelerate(model, max_batch_size=beams * max(batches), max_seq_len=most)
        return plain(model, beams)

    return [
        ("own cache", own),
        ("static cache", lambda: own(cache_implementation="static")),
        ("PagedCache", lambda: paged(False)),
        ("PagedCache, fused", lambda: paged(True)),
        ("accelerate", accelerated),
    ]


def main() -> None:
    args = command_line(
        __doc__,
        shape="llama-1b",
        dtype=("bf16", ", ".join(DTYPES)),
        batches=[1, 8],
        prompt=1024,
        new=128,
        beams=1,
        repeats=3,
        only={"type": lambda text: text.split(";"), "default": None, "help": "names, by semicolons"},
        output="",
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(select_shapes([args.shape])[0], device, DTYPES[args.dtype])
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "benchmark": "generate",
        "conditions": conditions.collect(device),
        "shape": args.shape,
        "dtype": args.dtype,
        "prompt": args.prompt,
        "new": args.new,
        "beams": args.beams,
        "rows": rows,
    }
    torch.manual_seed(0)
    prompts = {
        n: torch.randint(1, model.config.vocab_size, (n, args.prompt), device=device) for n in args.batches
    }
    wanted: dict[int, list[list[int]]] = {}
    most = args.prompt + args.new
    for name, make in ways(model, most, args.batches, args.beams):
        if name not in (args.only or [name]) or (args.only is None and name == "own cache"):
            continue
        call = make()
        for batch, inputs in prompts.items():
            row = {"way": name, "batch": batch, **measure(call, inputs, args.new, args.repeats)}
            tokens = row.pop("tokens")
            want = wanted.setdefault(batch, tokens)
            pairs = [
                (a, b)
                for got, expected in zip(tokens, want, strict=True)
                for a, b in zip(got, expected, strict=True)
            ]
            row["same_tokens"] = sum(a == b for a, b in pairs) / len(pairs)
            if args.dtype == "fp32" and row["same_tokens"] != 1.0:
                raise SystemExit(f"{name}, batch {batch}: other tokens than {rows[0]['way']}")
            rows.append(row)
            print(f"{name}, batch {batch}: {row['ms']:.3f} ms per token", file=sys.stderr, flush=True)
            keep(result, args.output)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
