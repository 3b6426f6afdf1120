"""Random batches against a float64 oracle on the GPU, each run twice: the results must agree bit for bit.

2,000 per kernel over a few model shapes, and a share of the random configurations of fuzz_attention.py. All
in worker processes with a watchdog: a hang fails its own test.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_pool import WorkerPool

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import Batch, BatchSpec, assert_within_budget, make_batch, run_paged_attention

pytestmark = pytest.mark.gpu
BATCHES, SHARE = 2000, 50
CONFIGURATIONS, TOGETHER = 32, 8
REFERENCE = BACKEND_OPS["reference"]

#: A few model shapes, since every shape is a compile; lengths, masks and padding vary freely over them.
SHAPES: list[dict[str, Any]] = [
    {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16, "block_size": 16},
    {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "dtype": torch.float16, "block_size": 16},
    {
        "num_heads": 7,
        "num_kv_heads": 1,
        "head_dim": 128,
        "dtype": torch.bfloat16,
        "block_size": 64,
        "heads_first": True,
    },
    {"num_heads": 4, "num_kv_heads": 4, "head_dim": 80, "dtype": torch.bfloat16, "block_size": 8},
    {"num_heads": 16, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.float16, "block_size": 32},
    {
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 192,
        "head_dim_v": 128,
        "dtype": torch.bfloat16,
        "block_size": 1,
    },
    {"num_heads": 16, "num_kv_heads": 4, "head_dim": 64, "dtype": torch.bfloat16, "block_size": 16},
    {"num_heads": 32, "num_kv_heads": 4, "head_dim": 64, "dtype": torch.float16, "block_size": 32},
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {},
    {"window_left": 37},
    {"logits_soft_cap": 6.0},
    {"chunk_size": 48},
    {"causal": False},
]
KERNELS = {"cuda decode": ("cuda", 8), "triton decode": ("triton", 8), "triton prefill": ("triton", 300)}


def random_spec(r: random.Random, longest_query: int) -> BatchSpec:
    """Mostly short requests, some long ones, some empty; query lengths as the kernel under test
    takes them."""
    requests = r.choice((1, 2, 3, 5, 9, 20))
    query_lens, seq_lens = [], []
    uniform = r.choice((1, 1, 1, 2, 4)) if longest_query <= 8 else 0
    for _ in range(requests):
        query = uniform or (1 if r.random() < 0.3 else r.randint(1, longest_query))
        before = r.choice(
            (0, r.randint(0, 40), r.randint(0, 300), r.randint(0, 2500 if r.random() < 0.1 else 100))
        )
        query_lens.append(query)
        seq_lens.append(0 if r.random() < 0.05 else query + before)
    if longest_query > 8 and max(query_lens) <= 8:
        query_lens[0], seq_lens[0] = 9, 9 + r.randint(0, 50)
    return BatchSpec(
        "fuzz",
        tuple(seq_lens),
        tuple(query_lens),
        padded_tokens=r.choice((0, 0, 3)),
        padded_reqs=r.choice((0, 0, 2)),
    )


def oracle_here(batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = replace(batch, q=batch.q.double(), k_cache=batch.k_cache.double(), v_cache=batch.v_cache.double())
    extras = {k: v.double() if k == "sinks" else v for k, v in wide.extras.items() if k != "semaphore"}
    return run_paged_attention(REFERENCE, replace(wide, extras=extras), **options)


def run_share(case: dict[str, Any], beat: Callable[..., None]) -> dict[str, Any]:
    """In the worker: one share of the batches of a kernel."""
    share, (backend, longest) = case["share"], KERNELS[case["kernel"]]
    r = random.Random(share)
    shape = SHAPES[share % len(SHAPES)]
    options = OPTIONS[share // len(SHAPES) % len(OPTIONS)]
    features = {"sinks": share % 4 == 1, "alibi": share % 5 == 2}
    for i in range(SHARE):
        beat("preparing", batch=i)
        batch = make_batch(
            random_spec(r, longest), seed=share * SHARE + i, device="cuda", **shape, **features
        )
        heads = shape["num_kv_heads"]
        batch.extras["semaphore"] = torch.zeros(
            batch.block_table.shape[0] * heads, dtype=torch.int32, device="cuda"
        )
        results = []
        for _ in range(2):
            beat("launching")
            results.append(run_paged_attention(BACKEND_OPS[backend], batch, **options))
            beat("running")
            torch.cuda.synchronize()
        (out, lse), (again, lse_again) = results
        assert torch.equal(out, again), f"not repeatable: {batch.spec}"
        assert torch.equal(lse, lse_again), f"not repeatable: {batch.spec}"
        assert not batch.extras["semaphore"].any(), batch.spec
        beat("checking")
        exact, exact_lse = oracle_here(batch, **options)
        same = run_paged_attention(
            REFERENCE,
            replace(batch, extras={k: v for k, v in batch.extras.items() if k != "semaphore"}),
            **options,
        )[0]
        try:
            assert_within_budget("out", out, same, exact, batch.q.dtype)
            assert_within_budget("lse", lse, exact_lse, exact_lse, torch.float16)
        except AssertionError as error:
            raise AssertionError(f"{batch.spec} {shape} {options}: {error}") from error
    return {"batches": SHARE}


@pytest.fixture(scope="module")
def shares() -> Iterator[WorkerPool]:
    """One process for all shares, since it keeps what it compiled; a new one after a failure."""
    folders = (Path(__file__).parent, Path(__file__).parents[2])
    with WorkerPool(
        "test_fuzz:run_share", environment={"PYTHONPATH": os.pathsep.join(map(str, folders))}
    ) as pool:
        yield pool


@pytest.mark.parametrize("share", range(BATCHES // SHARE))
@pytest.mark.parametrize("kernel", KERNELS)
def test_random_batches(kernel: str, share: int, shares: WorkerPool) -> None:
    (outcome,) = shares.run([{"kernel": kernel, "share": share}])
    assert outcome.kind == "done", (
        f"{outcome.kind} in batch {outcome.facts.get('batch')} while {outcome.phase}: {outcome.message}"
    )


@pytest.mark.parametrize("aim", ["", "cascade"])
@pytest.mark.parametrize("first_seed", range(1_000_000, 1_000_000 + CONFIGURATIONS, TOGETHER))
def test_random_configurations(first_seed: int, aim: str, configurations: WorkerPool) -> None:
    """A few of each kind; hundreds are the business of fuzz_attention.py."""
    shared = {
        "batches": 6,
        "backends": ["cuda", "triton"],
        "device": "cuda",
        "small": False,
        "captures": True,
        "aim": aim,
    }
    outcomes = list(configurations.run({"seed": first_seed + i, **shared} for i in range(TOGETHER)))
    assert len(outcomes) == TOGETHER
    wrong = [
        (o.case["seed"], o.kind, o.phase, o.message, (o.result or {}).get("failures"))
        for o in outcomes
        if o.result is None or o.result["failures"]
    ]
    assert not wrong


@pytest.fixture(scope="module")
def configurations() -> Iterator[WorkerPool]:
    """Several processes, since nearly all the time is the compilers'."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    with WorkerPool(
        "fuzz.case:run_case",
        workers=min(TOGETHER, os.cpu_count() or 1),
        environment=environment,
    ) as pool:
        yield pool
