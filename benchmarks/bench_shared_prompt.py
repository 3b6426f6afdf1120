"""How long the first token takes behind a prompt whose first tokens are known, next to one that is new.

    PYTHONPATH=. python benchmarks/bench_shared_prompt.py --shape llama-1b [--shared 4096] [--own 16]
        [--repeats 20] [--output FILE]

``cold``: prompts that have nothing in common; ``hit``: ``--shared`` tokens of an earlier one, then ``--own``
others; ``short``: ``--own`` new tokens alone. Milliseconds of `Generator.generate` for one new token, by the
host's clock, in turns; each prompt is new, weights are random. ``step``: of the hits, the engine's step
alone, and ``submitted``: what `generate` does ahead of it. In bfloat16 and fused on a GPU; on a CPU in
float32. ``same_tokens``: of how many hits the token is that of an engine without a prefix cache. The last
line is one JSON document.
"""

import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from decode_step.cases import build_model, select_shapes
from documents import command_line, finish
from measuring import conditions

from torchpaged.engine import Generator, SamplingParams

ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)


class Clock:
    """Milliseconds of calls of one method of ``owner``, the latest in ``ms``."""

    def __init__(self, owner: Any, method: str) -> None:
        self.ms, self.began, self._call = 0.0, 0.0, getattr(owner, method)
        setattr(owner, method, self)

    def __call__(self, *given: Any) -> Any:
        self.began = time.perf_counter()
        try:
            return self._call(*given)
        finally:
            self.ms = 1e3 * (time.perf_counter() - self.began)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def main() -> None:
    args = command_line(
        __doc__,
        shape="llama-1b",
        shared=(4096, "tokens that hits have in common"),
        own=(16, "tokens of each prompt behind them"),
        repeats=20,
        output=Path,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(
        select_shapes([args.shape])[0], device, torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    draw, most = random.Random(0), args.shared + args.own
    sizes: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": most + 16, "fuse": device.type == "cuda"}
    generator = Generator(model, num_blocks=16 * (most // 16 + 2), **sizes)
    print(generator.start_report, file=sys.stderr, flush=True)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, model.config.vocab_size) for _ in range(count)]

    shared = tokens(args.shared)
    generator.generate([shared, tokens(most)], ONE)
    step = Clock(generator._stepper, "step")
    found: dict[str, list[float]] = {name: [] for name in ("cold", "hit", "short", "step", "submitted")}
    prompts, outputs = list[list[int]](), list[list[int]]()
    for repeat in range(args.repeats + 2):
        asked = {"cold": tokens(most), "hit": shared + tokens(args.own), "short": tokens(args.own)}
        for kind, prompt in asked.items():
            before = generator.stats.prefix_cache.hit_tokens
            began = time.perf_counter()
            (output,) = generator.generate([prompt], ONE)
            ms = 1e3 * (time.perf_counter() - began)
            hit = generator.stats.prefix_cache.hit_tokens - before
            if hit != (args.shared // 16 * 16 if kind == "hit" else 0):
                raise SystemExit(f"{kind}: {hit} tokens were found")
            if kind == "hit":
                prompts.append(prompt)
                outputs.append(output.token_ids)
            if repeat < 2:
                continue
            found[kind].append(ms)
            if kind == "hit":
                found["step"].append(step.ms)
                found["submitted"].append(1e3 * (step.began - began))
    generator.close()
    plain = Generator(model, prefix_cache=False, share_prefixes=False, warm_up=False, **sizes)
    want = [output.token_ids for output in plain.generate(prompts[:8], ONE)]
    document = {
        "benchmark": "shared_prompt",
        "shape": args.shape,
        "shared": args.shared,
        "own": args.own,
        "ms": {name: spread(values) for name, values in found.items()},
        "same_tokens": sum(a == b for a, b in zip(want, outputs, strict=False)),
        "of": len(want),
        "conditions": conditions.collect(device),
    }
    ratio = document["ms"]["cold"]["median"] / document["ms"]["hit"]["median"]
    print(f"{ratio:.1f} times", document["ms"], file=sys.stderr, flush=True)
    finish(document, args.output)


if __name__ == "__main__":
    main()
