"""Prompts whose queries, keys and values are e4m3, on a Hopper GPU: time and error, against bf16 and against
FlashAttention-3.

    PYTHONPATH=. python benchmarks/bench_fp8_queries.py [--repeats 8] [--output fp8_queries.json]

32 query and 8 kv heads of 128, causal, normal random numbers; a scale per kv head brings the largest of each
to 448. Contenders in turns, medians of CUDA-graph replays: the ``cuda`` backend with e4m3 queries, and with
bf16 ones over an e4m3 cache and over a bf16 cache, blocks of 16 in random order; FlashAttention-3
(``flash_attn_interface``), where it can be imported, over the same blocks and over contiguous tensors. Rates
are over visible keys: 4 * head_dim * num_heads * their number. Errors are relative, of rows drawn from the
first request's second half, where rows see many keys: ``kernel`` against float64 on the very e4m3 numbers, so
that it is the kernel's own, ``all`` against float64 on the numbers before they were rounded. The last line is
one JSON document.
"""

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from documents import command_line, keep
from measuring import conditions
from measuring.timing import CudaSampler, interleave
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS

E4M3 = torch.float8_e4m3fn
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
SCALE = DIM**-0.5
ROWS = 128  # that the oracle computes
CALLS = 8  # of a graph


@dataclass(frozen=True)
class Case:
    """Requests of equal lengths."""

    name: str
    requests: int
    query_len: int
    seq_len: int

    def flops(self) -> int:
        """Over visible keys."""
        pairs = sum(range(self.seq_len - self.query_len + 1, self.seq_len + 1))
        return 4 * HEADS * DIM * pairs * self.requests


CASES = (
    Case("1 x 16k", 1, 16384, 16384),
    Case("1 x 8k", 1, 8192, 8192),
    Case("1 x 4k", 1, 4096, 4096),
    Case("8 x 512", 8, 512, 512),
    Case("512 on 32k", 1, 512, 32768 + 512),
)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x [requests, length, heads, DIM]`` as e4m3, and the scale of each kv head, ``[KV_HEADS]`` float32."""
    each = x.shape[2] // KV_HEADS
    scale = x.float().abs().unflatten(2, (KV_HEADS, each)).amax((0, 1, 3, 4)) / torch.finfo(E4M3).max
    return (x.float() / scale.repeat_interleave(each)[:, None]).to(E4M3), scale


class Inputs:
    """A case's tensors: of 16 bits, of 8, and both in blocks."""

    def __init__(self, case: Case) -> None:
        device, generator = torch.device("cuda"), torch.Generator("cuda").manual_seed(0)

        def normal(length: int, heads: int) -> Tensor:
            shape = (case.requests, length, heads, DIM)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        self.case = case
        self.wide = [normal(case.query_len, HEADS), *(normal(case.seq_len, KV_HEADS) for _ in range(2))]
        pairs = [rounded(x) for x in self.wide]
        self.narrow, self.scales = [x for x, _ in pairs], [scale for _, scale in pairs]
        columns = -(-case.seq_len // BLOCK)
        order = torch.randperm(case.requests * columns, generator=generator, device=device).int() + 1
        self.table = order.view(case.requests, columns)
        self.wide_pools = [self.in_blocks(x) for x in self.wide[1:]]
        self.narrow_pools = [self.in_blocks(x.view(torch.uint8)).view(E4M3) for x in self.narrow[1:]]
        lengths: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.seq_lens = torch.full((case.requests,), case.seq_len, **lengths)
        self.starts = torch.arange(case.requests + 1, **lengths) * case.query_len
        self.semaphore = torch.zeros(case.requests * KV_HEADS, **lengths)

    def in_blocks(self, x: Tensor) -> Tensor:
        pool = torch.zeros(self.table.numel() + 1, BLOCK, KV_HEADS, DIM, dtype=x.dtype, device=x.device)
        at = torch.arange(x.shape[1], device=x.device)
        pool[self.table[:, at // BLOCK].long(), at % BLOCK] = x
        return pool

    def ours(self, q: Tensor, pools: list[Tensor], **scales: Tensor) -> Callable[[], Tensor]:
        out = torch.full(
            (q.shape[0] * q.shape[1], HEADS, DIM), float("nan"), dtype=torch.bfloat16, device=q.device
        )
        tensors = (q.flatten(0, 1), *pools, self.table, self.seq_lens, self.starts, out)
        options = {
            "max_query_len": self.case.query_len,
            "scale": SCALE,
            "semaphore": self.semaphore,
            **scales,
        }

        def call() -> Tensor:
            BACKEND_OPS["cuda"].paged_attention(*tensors, **options)
            return out

        return call

    def contenders(self) -> dict[str, Callable[[], Tensor]]:
        (q, *_), (q8, *_), (q_scale, k_scale, v_scale) = self.wide, self.narrow, self.scales
        calls = {
            "e4m3 queries": self.ours(q8, self.narrow_pools, k_scale=q_scale * k_scale, v_scale=v_scale),
            "bf16 queries, e4m3 cache": self.ours(q, self.narrow_pools, k_scale=k_scale, v_scale=v_scale),
            "bf16": self.ours(q, self.wide_pools),
        }
        try:
            fa3: Any = importlib.import_module("flash_attn_interface")
        except Exception as error:  # its libraries may fail to load in many ways
            print(f"no FlashAttention-3: {type(error).__name__}: {error}"[:200], file=sys.stderr)
            return calls
        names = ("q_descale", "k_descale", "v_descale")
        descale = {
            name: scale.expand(self.case.requests, -1).contiguous()
            for name, scale in zip(names, self.scales, strict=True)
        }
        common = {"softmax_scale": SCALE, "causal": True}
        blocks = {"cache_seqlens": self.seq_lens, "page_table": self.table, **common}

        def first(found: Any) -> Tensor:
            out: Tensor = found[0] if isinstance(found, tuple) else found
            return out.flatten(0, 1)

        return calls | {
            "FA3 e4m3": lambda: first(
                fa3.flash_attn_with_kvcache(q8, *self.narrow_pools, **blocks, **descale)
            ),
            "FA3 e4m3, contiguous": lambda: first(fa3.flash_attn_func(*self.narrow, **common, **descale)),
            "FA3 bf16": lambda: first(fa3.flash_attn_with_kvcache(q, *self.wide_pools, **blocks)),
            "FA3 bf16, contiguous": lambda: first(fa3.flash_attn_func(*self.wide, **common)),
        }

    def exact(self, rows: Tensor, narrow: bool) -> Tensor:
        """``[rows, HEADS, DIM]`` float64, of the first request."""
        out = torch.empty(len(rows), HEADS, DIM, dtype=torch.float64, device="cuda")
        position = rows + self.case.seq_len - self.case.query_len
        hidden = torch.arange(self.case.seq_len, device="cuda") > position[:, None]
        for head in range(HEADS):
            kv, found = head // (HEADS // KV_HEADS), []
            for x, scale in zip(self.narrow if narrow else self.wide, self.scales, strict=True):
                own = x[0][:, head if x.shape[2] == HEADS else kv].double()
                found.append(own * scale[kv].double() if narrow else own)
            q, k, v = found
            scores = (q[rows] @ k.T * SCALE).masked_fill(hidden, float("-inf"))
            out[:, head] = scores.softmax(-1) @ v
        return out


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """A contender that fails, or errs as none may, is reported and not timed."""
    inputs, samplers, found = Inputs(case), {}, {}
    rows = torch.linspace(case.query_len // 2, case.query_len - 1, ROWS, device="cuda").long()
    exact = {"kernel": inputs.exact(rows, True), "all": inputs.exact(rows, False)}
    for name, call in inputs.contenders().items():
        narrow = "e4m3" in name
        try:
            got = call()[rows].double()
            errors = {
                of: float((got - x).norm() / x.norm()) for of, x in exact.items() if narrow or of == "all"
            }
            found[name] = {f"error_{of}": error for of, error in errors.items()}
            if not errors["all"] < 0.2:
                found[name]["failed"] = "wrong"
                continue
            samplers[name] = CudaSampler([call] * CALLS)
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    for name, timing in interleave(samplers, repeats).items():
        found[name] |= {"us": timing.median_us, "tflops": case.flops() / timing.median_us / 1e6}
    return {"case": case.name, "contenders": found}


def main() -> None:
    args = command_line(__doc__, repeats=8, output=Path)
    result: dict[str, Any] = {
        "benchmark": "fp8 queries",
        "conditions": conditions.collect(torch.device("cuda")),
    }
    result |= {"heads": [HEADS, KV_HEADS, DIM], "block_size": BLOCK, "results": []}
    for case in CASES:
        result["results"].append(measure(case, args.repeats))
        print(json.dumps(result["results"][-1]), file=sys.stderr, flush=True)
        keep(result, args.output)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
