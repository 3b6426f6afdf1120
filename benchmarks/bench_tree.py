"""Verifying a tree of draft tokens against as many plain query tokens: time of one attention layer, a GPU.

    PYTHONPATH=. python benchmarks/bench_tree.py --json tree.json

Llama 3 8B's heads, bfloat16, behind a context of 4,096 tokens; rounds go over several layers' caches, from
one CUDA graph each, in turns.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from documents import command_line, time_layers, write_results

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from op_inputs.trees import random_parents, words_of

from torchpaged.custom_ops import BACKEND_OPS

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16


def round_of(backend: str, batch: int, context: int, tokens: int, layers: int) -> dict[str, list[Any]]:
    """The calls of a round, by contender: one per layer."""
    length = context + tokens
    width = -(-length // BLOCK)
    table = (torch.randperm(batch * width, device="cuda") + 1).int().view(batch, width)
    pools = [
        torch.randn(2, batch * width + 1, BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(layers)
    ]
    q = torch.randn(batch * tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * tokens
    words = [w for row in range(batch) for w in words_of(random_parents(tokens, row, "deep"))]
    tree = torch.tensor(words, dtype=torch.int64, device="cuda")
    semaphore = torch.zeros(batch * KV_HEADS, dtype=torch.int32, device="cuda")
    op = BACKEND_OPS[backend].paged_attention

    def call(pool: torch.Tensor, **options: Any) -> Any:
        return lambda: op(
            q,
            pool[0],
            pool[1],
            table,
            lens,
            starts,
            out,
            max_query_len=tokens,
            scale=DIM**-0.5,
            semaphore=semaphore,
            **options,
        )

    return {"plain": [call(pool) for pool in pools], "tree": [call(pool, tree_mask=tree) for pool in pools]}


def main() -> None:
    arguments = command_line(
        __doc__,
        backends=["cuda"],
        context=4096,
        batches=[1, 8, 32],
        tokens=[8, 16, 32, 64],
        repeats=40,
        json=Path,
    )
    rows = []
    for backend in arguments.backends:
        for batch in arguments.batches:
            for tokens in arguments.tokens:
                layers = max(2, 12 // batch)
                calls = round_of(backend, batch, arguments.context, tokens, layers)
                row = {"backend": backend, "batch": batch, "context": arguments.context, "tokens": tokens}
                times = time_layers(calls, layers, arguments.repeats)
                row |= {f"{name}_us": us for name, us in times.items()}
                row["plain_over_tree"] = round(times["plain"] / times["tree"], 3)
                rows.append(row)
                print(json.dumps(row), flush=True)
                del calls
    write_results(rows, arguments.json)


if __name__ == "__main__":
    main()
