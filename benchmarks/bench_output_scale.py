"""Attention that writes e4m3 against one that writes bfloat16, and that with a rounding pass behind it: time
of one attention layer, a GPU.

    PYTHONPATH=. python benchmarks/bench_output_scale.py --json output_scale.json

Llama 3 8B's heads, bfloat16; rounds go over several layers' caches, from one CUDA graph each, in turns. The
pass behind is torch's own operators, as a model without a fused one has them.
"""

import json
from pathlib import Path
from typing import Any

import torch
from documents import command_line, time_layers, write_results

from torchpaged.custom_ops import BACKEND_OPS

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
#: name -> requests, query tokens of each, tokens of each
SHAPES = {
    "decode 32 x 4096": (32, 1, 4096),
    "prefill 8 x 512": (8, 512, 512),
    "decode 1 x 4096": (1, 1, 4096),
}


def round_of(backend: str, batch: int, tokens: int, length: int, layers: int) -> dict[str, list[Any]]:
    """The calls of a round, by contender: one per layer."""
    width = -(-length // BLOCK)
    table = (torch.randperm(batch * width, device="cuda") + 1).int().view(batch, width)
    shape = (2, batch * width + 1, BLOCK, KV_HEADS, DIM)
    pools = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
    q = torch.randn(batch * tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out, rounded = torch.empty_like(q), torch.empty_like(q, dtype=torch.float8_e4m3fn)
    lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * tokens
    semaphore = torch.zeros(batch * KV_HEADS, dtype=torch.int32, device="cuda")
    scale = torch.full((1,), 0.01, device="cuda")
    op = BACKEND_OPS[backend].paged_attention

    def call(pool: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
        named = {"max_query_len": tokens, "scale": DIM**-0.5, "semaphore": semaphore, **options}
        op(q, pool[0], pool[1], table, lens, starts, out, **named)

    def call_and_round(pool: torch.Tensor) -> None:
        call(pool, out)
        rounded.copy_((out / scale).clamp_(-448, 448))

    return {
        "bf16": [lambda pool=pool: call(pool, out) for pool in pools],
        "e4m3": [lambda pool=pool: call(pool, rounded, output_scale=scale) for pool in pools],
        "bf16_then_rounded": [lambda pool=pool: call_and_round(pool) for pool in pools],
    }


def main() -> None:
    arguments = command_line(__doc__, backends=["cuda", "triton"], repeats=40, json=Path)
    rows = []
    for backend in arguments.backends:
        for name, (batch, tokens, length) in SHAPES.items():
            layers = 2 if batch * length > 50_000 else 6
            calls = round_of(backend, batch, tokens, length, layers)
            row: dict[str, Any] = {"backend": backend, "shape": name}
            times = time_layers(calls, layers, arguments.repeats)
            rows.append(row | {f"{each}_us": us for each, us in times.items()})
            print(json.dumps(rows[-1]), flush=True)
            del calls
    write_results(rows, arguments.json)


if __name__ == "__main__":
    main()
