"""Mixtures of experts of a decode step on a GPU: route_experts and apply_experts against transformers'
router and grouped products.

    PYTHONPATH=. python benchmarks/bench_experts.py [--shapes deepseek-v2-lite qwen3-30b-a3b mixtral-8x7b]
        [--tokens 1 2 4 8 16 32 64] [--repeats 8] [--bandwidth 4.35] [--output FILE]

bf16, random weights in several copies by turns, calls back to back in one CUDA graph, contenders in turns;
compared with float32 first. ``ours``: both ops, the shared expert and the residual add included; ``apply``:
the second op alone; ``theirs``: softmax, top-k and grouped products of the routed experts alone, without what
else the module does. ``floor_us``: of the bytes of the experts that were chosen and of the shared one, at
``--bandwidth`` TB/s; ``share``: floor by ``ours``. The last line is one JSON document.
"""

import argparse
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from documents import command_line, time_layers, write_rows
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.moe import grouped_mm_experts_forward

from torchpaged.custom_ops import BACKEND_OPS

OPS = BACKEND_OPS["triton"]
#: Experts, of a token, hidden size, inner numbers of an expert and of the shared one, copies.
SHAPES = {
    "deepseek-v2-lite": (64, 6, 2048, 1408, 2816, 4),
    "qwen3-30b-a3b": (128, 8, 2048, 768, 0, 4),
    "mixtral-8x7b": (8, 2, 4096, 14336, 0, 2),
}


def random(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16) * size[-1] ** -0.5


class Mixture:
    """One copy of a shape's weights, and what its ops write."""

    def __init__(self, sizes: tuple[int, ...], x: Tensor) -> None:
        experts, top_k, hidden, inner, shared, _ = sizes
        self.x, self.out, self.router = x, torch.empty_like(x), random(experts, hidden)
        self.gate_up, self.down = random(experts, 2 * inner, hidden), random(experts, hidden, inner)
        self.options: dict[str, Any] = {"residual": x}
        if shared:
            self.options |= {
                "shared_gate_up": random(2 * shared, hidden),
                "shared_down": random(hidden, shared),
            }
        self.ids = torch.zeros(len(x), top_k, dtype=torch.int32, device="cuda")
        self.weights = torch.zeros(len(x), top_k, device="cuda")
        # what transformers' function reads of a module of experts
        self.module = SimpleNamespace(
            gate_up_proj=self.gate_up,
            down_proj=self.down,
            num_experts=experts,
            has_bias=False,
            is_transposed=False,
            has_gate=True,
            _is_expert_parallel=False,
            has_post_expert_norm=False,
            _apply_gate=lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1],
        )

    def route(self) -> None:
        OPS.route_experts(self.x, self.router, self.ids, self.weights, norm_eps=0.0)

    def apply(self) -> None:
        OPS.apply_experts(self.x, self.gate_up, self.down, self.ids, self.weights, self.out, **self.options)

    def ours(self) -> None:
        self.route()
        self.apply()

    def theirs(self) -> None:
        scores = F.linear(self.x, self.router).softmax(-1, dtype=torch.float32)
        weights, ids = scores.topk(self.ids.shape[1], dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(self.x.dtype)
        grouped_mm_experts_forward(self.module, self.x, ids, weights)

    def error(self) -> float:
        """Of ``ours``, relative to float32."""
        self.ours()
        want = torch.empty_like(self.x, dtype=torch.float32)
        wide = {name: value.float() for name, value in self.options.items()}
        tensors = (self.x.float(), self.gate_up.float(), self.down.float(), self.ids, self.weights, want)
        BACKEND_OPS["reference"].apply_experts(*tensors, **wide)
        return float((self.out.float() - want).norm() / want.norm())


def measure(shape: str, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    _, _, hidden, inner, shared, copies = SHAPES[shape]
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    mixtures = [Mixture(SHAPES[shape], x) for _ in range(copies)]
    error = max(mixture.error() for mixture in mixtures)
    if not error < 6e-3:
        raise SystemExit(f"{shape} at {tokens} tokens: relative error {error}")
    names = ("ours", "apply", "theirs")
    calls = {name: [partial(getattr(Mixture, name), each) for each in mixtures] for name in names}
    times = time_layers(calls, copies, args.repeats)
    chosen = sum(len(each.ids.unique()) for each in mixtures) / copies
    floor = 6 * hidden * (chosen * inner + shared) / args.bandwidth / 1e6
    row = {"shape": shape, "tokens": tokens, "chosen": chosen, "floor_us": round(floor, 1)}
    row |= times | {"share": round(floor / times["ours"], 3), "error": error}
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> None:
    args = command_line(
        __doc__,
        shapes={"nargs": "+", "default": list(SHAPES), "choices": list(SHAPES)},
        tokens=[1, 2, 4, 8, 16, 32, 64],
        repeats=8,
        bandwidth=(4.35, "TB/s that copies reach"),
        output=str,
    )
    write_rows([measure(shape, n, args) for shape in args.shapes for n in args.tokens], args.output)


if __name__ == "__main__":
    main()
