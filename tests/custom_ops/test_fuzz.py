"""Random calls of the ops on a CPU: NaN, inf, garbage, and arguments that must be refused with
nothing written.

The share that always runs takes seconds; ``-m slow`` runs 10,000 batches with the kernels. A failure names
its seed: `run_one` repeats it.
"""

import random
from typing import Any

import pytest
import torch
from kernels import INTERPRETED, Kernels, over
from nonfinite import INF, NAN, assert_as_expected, random_batch
from torch import Tensor

from torchpaged import ArgumentError
from torchpaged.testing import Batch, run_paged_attention

SHARE = 500
#: Batches per backend in the share that always runs.
ALWAYS = 12 if INTERPRETED else 150


def bad_changes(batch: Batch, r: random.Random) -> dict[str, dict[str, Any]]:
    """Name -> changes of a call's arguments that make no sense; all must be refused."""
    request = r.randrange(batch.block_table.shape[0])
    table, lens, starts = batch.block_table.clone(), batch.seq_lens.clone(), batch.query_start_loc.clone()
    table[request, 0] = r.choice((-1, batch.k_cache.shape[0], 2_000_000_011, -(2**31)))
    lens[request] = max(1, int(lens[request]))
    long = batch.seq_lens.clone()
    long[request] = r.choice((table.shape[1] * batch.k_cache.shape[1] + 1, 2**31 - 1))
    starts[r.randrange(len(starts))] = r.choice((-1, 2**30, batch.q.shape[0] + 1))
    changes: dict[str, dict[str, Any]] = {
        "block": {"block_table": table, "seq_lens": lens},
        "long": {"seq_lens": long},
        "starts": {"query_start_loc": starts},
        "scale": {"scale": r.choice((NAN, INF, -INF, 0.0, -1.0))},
        "cap": {"logits_soft_cap": r.choice((NAN, INF, -1.0))},
        "window": {r.choice(("window_left", "window_right")): r.randint(-9, -2)},
        "chunk": {"chunk_size": r.randint(-9, -1)},
        "lens_dtype": {"seq_lens": batch.seq_lens.long()},
        "rows": {"seq_lens": batch.seq_lens[:-1]},
        "max_query_len": {"max_query_len": 0},
        "pools": {"v_cache": batch.k_cache},
        "lse": {"lse": torch.zeros(batch.q.shape[:2], dtype=torch.float64)},
        "heads": {"q": torch.cat([batch.q, batch.q[:, :1]], dim=1)}
        if batch.k_cache.shape[2] > 1
        else {"q": batch.q[:, :0]},
        "table_dtype": {"block_table": batch.block_table.long()},
        "integers": {"k_cache": batch.k_cache.int(), "v_cache": batch.v_cache.int()},
    }
    size, used = (
        batch.k_cache.shape[1],
        (batch.seq_lens.clamp_min(0) + batch.k_cache.shape[1] - 1) // batch.k_cache.shape[1],
    )
    wide = [i for i in range(len(used)) if int(used[i]) > 1]
    if wide:
        twice = batch.block_table.clone()
        columns = r.sample(range(int(used[wide[0]])), 2)
        twice[wide[0], columns[0]] = twice[wide[0], columns[1]]
        changes["twice"] = {"block_table": twice}
    assert size
    return changes


def refuse_attention(ops: Any, batch: Batch, r: random.Random) -> None:
    for name in r.sample(sorted(changes := bad_changes(batch, r)), 2):
        out = torch.full((*batch.q.shape[:2], batch.v_cache.shape[3]), 7.0, dtype=batch.q.dtype)
        lse = torch.full(batch.q.shape[:2], 7.0)
        arguments: dict[str, Any] = (
            {
                "q": batch.q,
                "k_cache": batch.k_cache,
                "v_cache": batch.v_cache,
                "block_table": batch.block_table,
                "seq_lens": batch.seq_lens,
                "query_start_loc": batch.query_start_loc,
                "out": out,
                "lse": lse,
                "max_query_len": batch.max_query_len,
                "scale": batch.scale,
            }
            | batch.extras
            | changes[name]
        )
        try:
            ops.paged_attention(**arguments)
        except (ArgumentError, RuntimeError) as error:
            assert "expected" in str(error), f"{name}: {error}"
            assert bool((out == 7).all()), f"{name}: written before it was refused"
            assert bool((lse == 7).all()), f"{name}: written before it was refused"
            continue
        raise AssertionError(f"{name} was not refused: {changes[name]}")


def write_and_refuse(ops: Any, batch: Batch, r: random.Random) -> None:
    """write_kv of numbers that may be NaN or inf against rows copied one by one; slots that make no sense
    are refused."""
    k_cache, v_cache = batch.k_cache.clone(), batch.v_cache.clone()
    size, heads = k_cache.shape[1], k_cache.shape[2]
    slots = r.sample(range(k_cache.shape[0] * size), min(r.randint(0, 7), k_cache.shape[0] * size))
    slots = [-1 if r.random() < 0.2 else slot for slot in slots]
    k, v = (torch.randn(len(slots), heads, cache.shape[3]).to(cache.dtype) for cache in (k_cache, v_cache))
    for x in (k, v):
        if x.numel() and r.random() < 0.5:
            x.view(-1)[r.randrange(x.numel())] = r.choice((NAN, INF, -INF))
    want = k_cache.clone(), v_cache.clone()
    bad = r.random() < 0.5 and len(slots) > 1
    if bad:
        i, j = r.sample(range(len(slots)), 2)
        slots[i] = r.choice((-2, k_cache.shape[0] * size, 2**40, -(2**63), slots[j]))
        bad = slots[i] != slots[j] or slots[j] >= size
    if bad:
        try:
            ops.write_kv(k, v, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64))
            raise AssertionError(f"slots {slots} were not refused")
        except (ArgumentError, RuntimeError) as error:
            assert "slot_mapping" in str(error), error
    else:
        ops.write_kv(k, v, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64))
        for i, slot in enumerate(slots):
            if slot >= 0 and (slot >= size or slots.count(slot) == 1):
                want[0][slot // size, slot % size], want[1][slot // size, slot % size] = k[i], v[i]
    for got, exact in zip((k_cache, v_cache), want, strict=True):
        repeated = [slot for slot in slots if 0 <= slot < size and slots.count(slot) > 1]
        for slot in repeated:
            got[0, slot] = exact[0, slot] = 0
        assert torch.equal(got.isnan(), exact.isnan())
        assert torch.equal(got.nan_to_num(5.0), exact.nan_to_num(5.0))


def merge_any(ops: Any, r: random.Random, dtype: torch.dtype) -> None:
    """Every pairing of finite, infinite and NaN states, by torch's softmax."""
    numbers = (0.0, 1.5, -2.0, 40.0, -INF, -INF, INF, NAN)
    lse = torch.tensor([[r.choice(numbers) for _ in range(3)] for _ in range(8)]).view(2, 4, 3)
    states = torch.randn(2, 4, 3, 8).to(dtype)
    states[r.randrange(2), r.randrange(4), r.randrange(3), r.randrange(8)] = r.choice((NAN, INF))
    out, merged = torch.zeros(4, 3, 8, dtype=dtype), torch.zeros(4, 3)
    ops.merge_attn_states(states[0], lse[0], states[1], lse[1], out, merged)
    total = torch.logsumexp(lse.double(), dim=0)
    bad, seen = total.isnan() | (total == INF), lse != -INF
    weights = torch.softmax(lse.double(), dim=0)[..., None]
    exact = sum(torch.where(seen[i, ..., None], weights[i] * states[i].double(), 0.0) for i in range(2))
    assert isinstance(exact, Tensor)
    exact = torch.where(bad[..., None], NAN, exact)
    torch.testing.assert_close(
        merged.double(), torch.where(bad, NAN, total), rtol=1e-5, atol=1e-5, equal_nan=True
    )
    tolerance = max(8 * torch.finfo(dtype).eps, 1e-5)  # a weight of e^-40 is off by 40 roundings in float32
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance, equal_nan=True)


def run_one(on: Kernels, seed: int) -> None:
    """One batch: attention, refusals, a cache write and a merge."""
    r, ops = random.Random(seed), on.ops
    torch.manual_seed(seed)
    batch, options = random_batch(r, dtypes=(torch.float32, torch.bfloat16, torch.float16), small=INTERPRETED)
    try:
        assert_as_expected(
            run_paged_attention(ops, batch, **options), batch, exact=on.backend != "triton", **options
        )
        refuse_attention(ops, batch, r)
        write_and_refuse(ops, batch, r)
        merge_any(ops, r, batch.q.dtype)
    except Exception as error:
        raise AssertionError(
            f"{on}, seed {seed}: {batch.spec}, {options}, {batch.q.dtype}: {error}"
        ) from error


def run_share(on: Kernels, share: int, count: int) -> None:
    for seed in range(share * SHARE, share * SHARE + count):
        run_one(on, seed)


@over("reference", "cpu", "triton", gpu=())
def test_random_batches(on: Kernels) -> None:
    run_share(on, 0, ALWAYS)


@pytest.mark.long
@pytest.mark.slow
@over("reference", "cpu", gpu=(), share=range(20))
def test_ten_thousand_random_batches(on: Kernels, share: int) -> None:
    if on.backend == "reference" and share >= 4:
        pytest.skip("its checks are those of all backends")
    run_share(on, share, SHARE)
