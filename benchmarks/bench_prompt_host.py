"""What prompts alone cost the host: microseconds of its thread per request, by part, of requests of many
tokens that all come at once and want one token each.

    PYTHONPATH=. python benchmarks/bench_prompt_host.py [--requests 64] [--tokens 2048] [--chunk 2048]
    PYTHONPATH=. python benchmarks/bench_prompt_host.py --known 4096 [--requests 64]

On a CPU, with a model that computes nothing: its logits are zeros. Sampling is left out, which on a CPU is
torch's. Parts may hold others: ``step`` has all but ``submit``. Of several runs the one that took least.

With ``--known`` requests come one by one: so many tokens that are known, and 16 others, of a model of 16
layers whose prompts are replayed. ``front``: until the replay; ``beside``: until the token is there, which
on a GPU is what the host does meanwhile; ``behind``: until `generate` returns. Also where 64 MiB were written
ahead of each (``cold``), as a processor's caches are behind a wait. Of each the least, and the median.

The last line is one JSON document.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from documents import command_line
from measuring import conditions
from transformers import LlamaConfig, LlamaForCausalLM

from torchpaged.backends import Limits
from torchpaged.engine import Generator, SamplingParams
from torchpaged.engine.device import CopiedTokens
from torchpaged.graphs import TapeCapture
from torchpaged.hf import PagedModel

VOCAB, BLOCK_SIZE, RUNS, OWN = 1000, 16, 7, 16
ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)


class NoModel(PagedModel):
    """Computes nothing once ``is_off``."""

    is_off = False

    def __call__(self, input_ids: Any, metadata: Any, logits_indices: Any = None) -> Any:
        if not self.is_off:
            return super().__call__(input_ids, metadata, logits_indices)
        return torch.zeros((input_ids if logits_indices is None else logits_indices).numel(), VOCAB)


def made(num_reqs: int, tokens: int, chunk: int, layers: int = 1, **options: Any) -> Generator:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=VOCAB, num_hidden_layers=layers, max_position_embeddings=2 * tokens, **sizes
    )
    blocks = tokens // BLOCK_SIZE + 2
    model = NoModel(
        LlamaForCausalLM(config).eval(),
        num_blocks=num_reqs * blocks + 1,
        limits=Limits(max_num_reqs=num_reqs, max_blocks_per_req=blocks),
    )
    options |= {"max_batch_size": num_reqs, "max_seq_len": tokens + 16, "prefill_chunk_size": chunk}
    generator = Generator(model, **options, compile=False, capture_ahead=False)
    model.is_off = True
    return generator


def parts_of(generator: Generator) -> dict[str, tuple[Any, str]]:
    """What is timed: an object and its method."""
    stepper, scheduler, loop = generator._stepper, generator.scheduler, generator.loop
    assert loop is not None
    return {
        "submit": (generator, "_sequence"),
        "step": (stepper, "step"),
        "schedule": (scheduler, "schedule"),
        "batch": (stepper._packed, "prefill"),
        "prefix cache, computed": (scheduler.blocks, "computed"),
        "rows": (loop.rows, "write"),
        "end": (scheduler, "remove"),
        "sampling": (loop.rows, "finish_rows"),
    }


def hits(known: int, count: int) -> dict[str, dict[str, float]]:
    """Microseconds of ``count`` hits, warm and cold, by part."""
    options: dict[str, Any] = {"prefill_buckets": [OWN], "capture": TapeCapture()}
    generator, ends, draw = made(8, known + OWN, 512, 16, **options), [0.0] * 4, random.Random(0)
    assert generator.loop is not None
    runner, rows = generator.prefill_runners[0], generator.loop.rows
    token, written = torch.zeros(1, dtype=torch.int64), torch.zeros(2**23, dtype=torch.int64)
    rows._finish = lambda logits, fields: token  # type: ignore[method-assign]

    def noted(place: int, call: Callable[..., Any], ahead: bool) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            if ahead:
                ends[place] = time.perf_counter()
            result = call(*given)
            if not ahead:
                ends[place] = time.perf_counter()
            return result

        return run

    runner._replay = noted(1, runner._replay, True)  # type: ignore[method-assign]
    CopiedTokens.wait = noted(2, CopiedTokens.wait, False)  # type: ignore[method-assign]
    shared = [draw.randrange(3, VOCAB) for _ in range(known)]
    generator.generate([shared], ONE)
    found: dict[str, dict[str, float]] = {}
    for kind in ("warm", "cold"):
        seen = list[list[float]]()
        for _ in range(count):
            prompt = shared + [draw.randrange(3, VOCAB) for _ in range(OWN)]
            if kind == "cold":
                written.add_(1)
            ends[0] = time.perf_counter()
            generator.generate([prompt], ONE)
            ends[3] = time.perf_counter()
            seen.append([1e6 * (after - before) for before, after in pairwise(ends)])
        for name, column in zip(("front", "beside", "behind"), zip(*seen, strict=True), strict=True):
            found[f"{kind}, {name}"] = {"least": min(column), "median": statistics.median(column)}
    assert generator.stats.prefix_cache.hit_tokens == 2 * count * known
    return found


def main() -> None:
    args = command_line(
        __doc__,
        requests=(64, "at once, or one by one"),
        tokens=(2048, "of each prompt"),
        chunk=(2048, "prefill_chunk_size"),
        known=(0, "tokens that hits have in common; 0: no hits"),
    )
    torch.set_num_threads(1)
    if args.known:
        us = hits(args.known, args.requests)
        for name, of in us.items():
            print(f"{name:14} {of['least']:8.0f} {of['median']:8.0f} us per request", file=sys.stderr)
        print(json.dumps({"conditions": conditions.collect(torch.device("cpu")), **vars(args), "us": us}))
        return
    generator, taken = made(args.requests, args.tokens, args.chunk), dict[str, float]()

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*given)
            finally:
                taken[name] = taken.get(name, 0.0) + time.thread_time() - began

        return run

    for name, (owner, method) in parts_of(generator).items():
        setattr(owner, method, timed(name, getattr(owner, method)))
    draw, runs = random.Random(0), list[dict[str, float]]()
    for _ in range(RUNS):
        prompts = [[draw.randrange(3, VOCAB) for _ in range(args.tokens)] for _ in range(args.requests)]
        taken.clear()
        timed("all", generator.generate)(prompts, ONE)
        runs.append({name: 1e6 * seconds / args.requests for name, seconds in taken.items()})
    best = min(runs, key=lambda run: run["all"] - run["sampling"])
    for name in ("all", "step"):
        best[name] -= best["sampling"]
    for name, spent in sorted(best.items(), key=lambda item: -item[1]):
        print(f"{name:24} {spent:8.0f} us per request", file=sys.stderr)
    print(json.dumps({"conditions": conditions.collect(torch.device("cpu")), **vars(args), "us": best}))


if __name__ == "__main__":
    main()
