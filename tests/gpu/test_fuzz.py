"""2,000 random batches per kernel against a float64 oracle on the GPU, each run twice: the results must agree bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import Batch, BatchSpec, assert_within_budget, make_batch, run_paged_attention

pytestmark = pytest.mark.gpu
BATCHES, SHARE = 2000, 50
REFERENCE = BACKEND_OPS["reference"]

#: A few model shapes, since every shape is a compile; lengths, masks and padding vary freely over them.
SHAPES: list[dict[str, Any]] = [
    {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16, "block_size": 16},
    {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "dtype": torch.float16, "block_size": 16},
    {"num_heads": 7, "num_kv_heads": 1, "head_dim": 128, "dtype": torch.bfloat16, "block_size": 64, "heads_first": True},
    {"num_heads": 4, "num_kv_heads": 4, "head_dim": 80, "dtype": torch.bfloat16, "block_size": 8},
    {"num_heads": 16, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.float16, "block_size": 32},
    {"num_heads": 8, "num_kv_heads": 2, "head_dim": 192, "head_dim_v": 128, "dtype": torch.bfloat16, "block_size": 1},
    {"num_heads": 16, "num_kv_heads": 4, "head_dim": 64, "dtype": torch.bfloat16, "block_size": 16},
    {"num_heads": 32, "num_kv_heads": 4, "head_dim": 64, "dtype": torch.float16, "block_size": 32},
]
OPTIONS: list[dict[str, Any]] = [{}, {}, {"window_left": 37}, {"logits_soft_cap": 6.0}, {"chunk_size": 48}, {"causal": False}]
KERNELS = {"cuda decode": ("cuda", 8), "triton decode": ("triton", 8), "triton prefill": ("triton", 300)}


def random_spec(r: random.Random, longest_query: int) -> BatchSpec:
    """Mostly short requests, some long ones, some empty; query lengths as the kernel under test takes them."""
    requests = r.choice((1, 2, 3, 5, 9, 20))
    query_lens, seq_lens = [], []
    uniform = r.choice((1, 1, 1, 2, 4)) if longest_query <= 8 else 0
    for _ in range(requests):
        query = uniform or (1 if r.random() < 0.3 else r.randint(1, longest_query))
        before = r.choice((0, r.randint(0, 40), r.randint(0, 300), r.randint(0, 2500 if r.random() < 0.1 else 100)))
        query_lens.append(query)
        seq_lens.append(0 if r.random() < 0.05 else query + before)
    if longest_query > 8 and max(query_lens) <= 8:
        query_lens[0], seq_lens[0] = 9, 9 + r.randint(0, 50)
    return BatchSpec("fuzz", tuple(seq_lens), tuple(query_lens), padded_tokens=r.choice((0, 0, 3)), padded_reqs=r.choice((0, 0, 2)))


def oracle_here(batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = replace(batch, q=batch.q.double(), k_cache=batch.k_cache.double(), v_cache=batch.v_cache.double())
    extras = {k: v.double() if k == "sinks" else v for k, v in wide.extras.items() if k != "semaphore"}
    return run_paged_attention(REFERENCE, replace(wide, extras=extras), **options)


@pytest.mark.parametrize("share", range(BATCHES // SHARE))
@pytest.mark.parametrize("kernel", KERNELS)
def test_random_batches(kernel: str, share: int) -> None:
    backend, longest = KERNELS[kernel]
    r = random.Random(share)
    shape = SHAPES[share % len(SHAPES)]
    options = OPTIONS[share // len(SHAPES) % len(OPTIONS)]
    features = {"sinks": share % 4 == 1, "alibi": share % 5 == 2}
    for i in range(SHARE):
        batch = make_batch(random_spec(r, longest), seed=share * SHARE + i, device="cuda", **shape, **features)
        heads = shape["num_kv_heads"]
        batch.extras["semaphore"] = torch.zeros(batch.block_table.shape[0] * heads, dtype=torch.int32, device="cuda")
        out, lse = run_paged_attention(BACKEND_OPS[backend], batch, **options)
        again, lse_again = run_paged_attention(BACKEND_OPS[backend], batch, **options)
        assert torch.equal(out, again) and torch.equal(lse, lse_again), f"not repeatable: {batch.spec}"
        assert not batch.extras["semaphore"].any(), batch.spec
        exact, exact_lse = oracle_here(batch, **options)
        same = run_paged_attention(
            REFERENCE, replace(batch, extras={k: v for k, v in batch.extras.items() if k != "semaphore"}), **options
        )[0]
        try:
            assert_within_budget("out", out, same, exact, batch.q.dtype)
            assert_within_budget("lse", lse, exact_lse, exact_lse, torch.float16)
        except AssertionError as error:
            raise AssertionError(f"{batch.spec} {shape} {options}: {error}") from error
