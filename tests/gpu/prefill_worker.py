"""Random batches for the CUDA C++ prefill kernel, in a process that may be
killed: tests/gpu/test_prefill_kernel.py.

For each line "CONFIGURATION SEED" on its standard input a line "launched" once the kernel is compiled and on
its way, and a line "done" or "failed:
..." once it has ended and its results are checked.
"""

from __future__ import annotations

import random
import sys
import traceback
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.cuda import prefill
from torchpaged.testing import Batch, BatchSpec, assert_within_budget, make_batch, run_paged_attention

#: Sizes of the model and the pools, and options of the op.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}, {}),
    "no_group_blocks_of_8": ({"num_heads": 4, "num_kv_heads": 4, "head_dim": 128, "block_size": 8}, {}),
    "group_of_7": ({"num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "block_size": 32}, {}),
    "group_of_128": ({"num_heads": 128, "num_kv_heads": 1, "head_dim": 64}, {}),
    "width_64": ({"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}, {}),
    "width_96": ({"num_heads": 8, "num_kv_heads": 4, "head_dim": 96}, {"window_left": 70}),
    "width_192_128": (
        {"num_heads": 4, "num_kv_heads": 4, "head_dim": 192, "head_dim_v": 128, "dtype": torch.float16},
        {},
    ),
    "width_256": (
        {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256},
        {"logits_soft_cap": 4.0, "window_left": 300},
    ),
    "heads_first": (
        {"num_heads": 8, "num_kv_heads": 4, "head_dim": 128, "heads_first": True},
        {"chunk_size": 200},
    ),
    "windows": (
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "sinks": True},
        {"causal": False, "window_left": 40, "window_right": 130},
    ),
    "no_mask": ({"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "block_size": 128}, {"causal": False}),
    "alibi": ({"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "alibi": True, "sinks": True}, {}),
    "e4m3": (
        {
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
            "kv_dtype": torch.float8_e4m3fn,
            "scales": "per_head",
        },
        {},
    ),
    "e5m2_heads_first": (
        {
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 128,
            "heads_first": True,
            "kv_dtype": torch.float8_e5m2,
            "dtype": torch.float16,
        },
        {"window_left": 200},
    ),
    "e4m3_width_64": (
        {
            "num_heads": 8,
            "num_kv_heads": 2,
            "head_dim": 64,
            "kv_dtype": torch.float8_e4m3fn,
            "scales": "one",
            "sinks": True,
        },
        {},
    ),
    "e4m3_width_96": (
        {"num_heads": 8, "num_kv_heads": 4, "head_dim": 96, "kv_dtype": torch.float8_e4m3fn},
        {"causal": False},
    ),
    "e5m2_width_256": (
        {
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 256,
            "kv_dtype": torch.float8_e5m2,
            "scales": "per_head",
        },
        {"logits_soft_cap": 4.0, "window_left": 300},
    ),
    "e4m3_width_192_128": (
        {
            "num_heads": 4,
            "num_kv_heads": 4,
            "head_dim": 192,
            "head_dim_v": 128,
            "kv_dtype": torch.float8_e4m3fn,
            "scales": "one",
            "block_size": 8,
        },
        {"chunk_size": 200},
    ),
}


def draw(rng: random.Random) -> BatchSpec:
    """A few or many requests; long, short and empty ones, some with a context, some with left padding; rows
    behind the last."""
    query_lens, seq_lens = [], []
    for _ in range(rng.choice([1, 2, 3, 9, 40])):
        query_len = rng.choice(
            [0, 1, 2, 31, 32, 33, 64, 127, 128, 129, rng.randrange(1, 400), rng.randrange(1, 1200)]
        )
        context = rng.choice([0, 0, 1, 95, 96, 128, rng.randrange(1, 3000), -rng.randrange(1, 50)])
        query_lens.append(query_len)
        seq_lens.append(query_len + context if query_len or rng.random() < 0.5 else 0)
    return BatchSpec("drawn", tuple(seq_lens), tuple(query_lens), padded_tokens=rng.choice([0, 1, 200]))


def launch(batch: Batch, tickets: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The kernel itself, whichever backend would serve the call."""
    shape = (*batch.q.shape[:2], batch.v_cache.shape[-1])
    out = torch.full(shape, float("nan"), dtype=batch.q.dtype, device=batch.q.device)
    lse = torch.full(shape[:2], float("nan"), dtype=torch.float32, device=batch.q.device)
    arguments = {**batch.extras, **options}
    reason = prefill.why_not(
        batch.q, batch.k_cache, batch.v_cache, out, scale=batch.scale, sinks=arguments.get("sinks")
    )
    assert reason is None, reason
    prefill.attend(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        out,
        lse,
        scale=batch.scale,
        semaphore=tickets,
        **arguments,
    )
    return out, lse


def check(name: str, seed: int) -> None:
    """Results against the reference in float64, the same bits twice and from a graph, tickets given back."""
    sizes, options = CONFIGURATIONS[name]
    batch = make_batch(draw(random.Random(seed)), seed=seed, **{"dtype": torch.bfloat16, **sizes}).to("cuda")
    tickets = torch.zeros(2, dtype=torch.int32, device="cuda")
    out, lse = launch(batch, tickets, options)
    print("launched", flush=True)
    torch.cuda.synchronize()
    assert not tickets.any(), "tickets are not given back"
    again, _ = launch(batch, tickets, options)
    assert torch.equal(out, again), "other bits the second time"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = launch(batch, tickets, options)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, captured), "other bits from a graph"
    reference = BACKEND_OPS["reference"]
    extras = {key: x.double() if key == "sinks" else x for key, x in batch.extras.items()}
    pools = {"k_cache": batch.k_cache, "v_cache": batch.v_cache}  # of fp8 they stay, for their scales
    wide_pools = {name: x.double() if x.itemsize > 1 else x for name, x in pools.items()}
    wide = replace(batch, q=batch.q.double(), extras=extras, **wide_pools)
    exact, exact_lse = run_paged_attention(reference, wide, **options)
    nearly, _ = run_paged_attention(reference, batch, **options)
    assert_within_budget("out", out, nearly, exact, batch.q.dtype)
    assert_within_budget("lse", lse, exact_lse, exact_lse, torch.float16)


def main() -> None:
    """Lines until the input ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        name, seed = line.split()
        try:
            check(name, int(seed))
            print("done", flush=True)
        except Exception:
            print("failed: " + traceback.format_exc().replace("\n", " | "), flush=True)


if __name__ == "__main__":
    main()
