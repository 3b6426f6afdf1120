"""What prompts alone cost the host: microseconds of its thread per request, by part, of requests of many
tokens that all come at once and want one token each.

    PYTHONPATH=. python benchmarks/bench_prompt_host.py [--requests 64] [--tokens 2048] [--chunk 2048]

On a CPU, with a model that computes nothing: its logits are zeros. Sampling is left out, which on a CPU is
torch's. Parts may hold others: ``step`` has all but ``submit``. Of several runs the one that took least; the
last line is one JSON document.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from documents import command_line
from measuring import conditions
from transformers import LlamaConfig, LlamaForCausalLM

from torchpaged.backends import Limits
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedModel

VOCAB, BLOCK_SIZE, RUNS = 1000, 16, 7
ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)


class NoModel(PagedModel):
    """Computes nothing once ``is_off``."""

    is_off = False

    def __call__(self, input_ids: Any, metadata: Any, logits_indices: Any = None) -> Any:
        if not self.is_off:
            return super().__call__(input_ids, metadata, logits_indices)
        return torch.zeros((input_ids if logits_indices is None else logits_indices).numel(), VOCAB)


def made(num_reqs: int, tokens: int, chunk: int) -> Generator:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=1, max_position_embeddings=2 * tokens, **sizes)
    blocks = tokens // BLOCK_SIZE + 2
    model = NoModel(
        LlamaForCausalLM(config).eval(),
        num_blocks=num_reqs * blocks + 1,
        limits=Limits(max_num_reqs=num_reqs, max_blocks_per_req=blocks),
    )
    options = {"max_batch_size": num_reqs, "max_seq_len": tokens + 16, "prefill_chunk_size": chunk}
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


def main() -> None:
    args = command_line(
        __doc__, requests=(64, "at once"), tokens=(2048, "of each prompt"), chunk=(2048, "prefill_chunk_size")
    )
    torch.set_num_threads(1)
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
    for name, us in sorted(best.items(), key=lambda item: -item[1]):
        print(f"{name:24} {us:8.0f} us per request", file=sys.stderr)
    print(json.dumps({"conditions": conditions.collect(torch.device("cpu")), **vars(args), "us": best}))


if __name__ == "__main__":
    main()
