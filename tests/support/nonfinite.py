"""Batches with NaN and inf in them, and what docs/ops.md says must come out, written down without any of the
library's masks.

Shared by the tests of NaN and inf (CPU, interpreter, GPU) and by the fuzz.
"""

import math
import random
from typing import Any

import torch
from torch import Tensor

from torchpaged.testing import Batch, BatchSpec, make_batch

NAN, INF = math.nan, math.inf


def keys_seen(batch: Batch, request: int, query: int, options: dict[str, Any]) -> list[int]:
    """Positions of the keys that one query sees, from the words of docs/ops.md."""
    length = int(batch.seq_lens[request])
    position = length - int(batch.query_start_loc[request + 1] - batch.query_start_loc[request]) + query
    if position < 0:
        return []
    left, right, chunk = (
        options.get(name, default)
        for name, default in (("window_left", -1), ("window_right", -1), ("chunk_size", 0))
    )
    return [
        key
        for key in range(length)
        if (key <= position or not options.get("causal", True))
        and (left < 0 or position - key <= left)
        and (right < 0 or key - position <= right)
        and (not chunk or key // chunk == position // chunk)
    ]


def dense(batch: Batch, request: int) -> tuple[Tensor, Tensor]:
    """A request's keys and values ``[L, K, D]`` in float64, by hand from its table."""
    size, table = batch.k_cache.shape[1], batch.block_table[request].tolist()
    at = [(table[p // size], p % size) for p in range(int(batch.seq_lens[request]))]
    keys, values = (
        torch.stack([cache[where].double() for where in at]) for cache in (batch.k_cache, batch.v_cache)
    )
    for x, scale in ((keys, batch.extras.get("k_scale")), (values, batch.extras.get("v_scale"))):
        if scale is not None:
            x *= scale.double().view(-1, 1)
    return keys, values


def expected(batch: Batch, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, lse, smeared)``: torch's softmax over what each query sees, and nothing else, in float64.

    ``smeared`` marks the numbers of ``out`` that a kernel of matrix products may turn into NaN: another query
    of the same request and the same step sees a value there that is not finite.
    """
    tokens, heads = batch.q.shape[:2]
    group = heads // batch.k_cache.shape[2]
    out = torch.zeros(tokens, heads, batch.v_cache.shape[3], dtype=torch.float64)
    lse = torch.full((tokens, heads), -INF, dtype=torch.float64)
    smeared = torch.zeros_like(out, dtype=torch.bool)
    slopes, sinks, cap = (
        batch.extras.get("alibi_slopes"),
        batch.extras.get("sinks"),
        options.get("logits_soft_cap", 0.0),
    )
    starts = batch.query_start_loc.tolist()
    for request in range(len(starts) - 1):
        if int(batch.seq_lens[request]) <= 0:
            continue
        keys, values = (x.repeat_interleave(group, dim=1) for x in dense(batch, request))
        position = int(batch.seq_lens[request]) - (starts[request + 1] - starts[request])
        union: set[int] = set()
        for token in range(starts[request], starts[request + 1]):
            seen = keys_seen(batch, request, token - starts[request], options)
            if not seen:
                continue
            union.update(seen)
            scores = torch.einsum("hd,lhd->hl", batch.q[token].double(), keys[seen]) * batch.scale
            if cap:
                scores = cap * torch.tanh(scores / cap)
            if slopes is not None:
                scores = scores + slopes.double()[:, None] * (
                    torch.tensor(seen) - (position + token - starts[request])
                )
            logits = scores if sinks is None else torch.cat([scores, sinks.double()[:, None]], dim=-1)
            weights = torch.softmax(logits, dim=-1)[:, : len(seen)]
            out[token] = torch.einsum("hl,lhd->hd", weights, values[seen])
            lse[token] = torch.logsumexp(logits, dim=-1)
        if union:
            bad = (~values[sorted(union)].isfinite()).any(0)  # [H, D]
            smeared[starts[request] : starts[request + 1]] = bad
    lse = torch.where(lse == INF, NAN, lse)
    return out, lse, smeared


def assert_as_expected(got: tuple[Tensor, Tensor], batch: Batch, *, exact: bool, **options: Any) -> None:
    """NaN where the rule says so, nothing else, and the other numbers right. ``exact``: the backend
    smears nothing."""
    want, want_lse, smeared = expected(batch, **options)
    out, lse = (x.double().cpu() for x in got)
    dtype = batch.q.dtype
    assert torch.equal(lse.isnan(), want_lse.isnan()), (
        f"lse NaN at {(lse.isnan() != want_lse.isnan()).nonzero()[:4].tolist()}"
    )
    assert torch.equal(lse == -INF, want_lse == -INF), (
        f"lse -inf at {((lse == -INF) != (want_lse == -INF)).nonzero()[:4].tolist()}"
    )
    torch.testing.assert_close(
        lse, want_lse, rtol=1e-3, atol=4e-3 if dtype != torch.float32 else 2e-4, equal_nan=True
    )
    assert not bool((want.isnan() & out.isfinite()).any()), (
        f"finite where NaN was due: {(want.isnan() & out.isfinite()).nonzero()[:4].tolist()}"
    )
    assert not bool((want.isinf() & out.isfinite()).any()), (
        f"finite where inf was due: {(want.isinf() & out.isfinite()).nonzero()[:4].tolist()}"
    )
    poisoned = want.isfinite() & ~out.isfinite()
    if not exact:
        poisoned &= ~smeared
    assert not bool(poisoned.any()), f"not finite where nothing was seen: {poisoned.nonzero()[:4].tolist()}"
    both = want.isfinite() & out.isfinite()
    largest = float(want[both].abs().max()) if bool(both.any()) else 0.0
    error = float((out - want)[both].abs().max()) if bool(both.any()) else 0.0
    assert error <= max(2e-5, 16 * torch.finfo(dtype).eps) * max(largest, 4.0), f"error {error:.2e}"


def poke(batch: Batch, what: str, value: float, request: int, position: int, head: int, column: int) -> None:
    """Set one number of the batch: of the query at, or of the key or value stored for, ``position``
    of ``request``."""
    if what == "q":
        last = int(batch.query_start_loc[request + 1]) - 1
        batch.q[last - (int(batch.seq_lens[request]) - 1 - position), head, column] = value
        return
    size = batch.k_cache.shape[1]
    block = int(batch.block_table[request, position // size])
    {"k": batch.k_cache, "v": batch.v_cache}[what][block, position % size, head, column] = value


def random_batch(
    r: random.Random, *, dtypes: tuple[torch.dtype, ...], small: bool = False
) -> tuple[Batch, dict[str, Any]]:
    """A batch of any shape and mask; half of them with up to three NaN or inf among queries, keys, values
    or sinks."""
    requests = r.randint(1, 2 if small else 4)
    decode = r.random() < 0.4
    queries = [1 if decode else r.randint(0, 6 if small else 9) for _ in range(requests)]
    lens = [
        max(0, q + r.choice((0, 0, r.randint(0, 12), r.randint(0, 40), -r.randint(0, 3))))
        if r.random() > 0.06
        else 0
        for q in queries
    ]
    spec = BatchSpec(
        "fuzz",
        tuple(lens),
        tuple(queries),
        padded_tokens=r.choice((0, 0, 2)),
        padded_reqs=r.choice((0, 0, 1)),
    )
    kv_heads, dim = r.choice((1, 2)), r.choice((8, 16) if small else (4, 8, 13, 16, 32, 40))
    batch = make_batch(
        spec,
        num_heads=kv_heads * r.choice((1, 2, 3)),
        num_kv_heads=kv_heads,
        head_dim=dim,
        head_dim_v=r.choice((None, None, 12)),
        block_size=r.choice((8, 16) if small else (1, 3, 8, 16)),
        dtype=r.choice(dtypes),
        seed=r.getrandbits(32),
        heads_first=r.random() < 0.2,
        sinks=r.random() < 0.25,
        alibi=r.random() < 0.2,
    )
    options = r.choice(
        (
            {},
            {},
            {"causal": False},
            {"window_left": r.randint(0, 20)},
            {"causal": False, "window_left": r.randint(0, 9), "window_right": r.randint(0, 9)},
            {"causal": False, "window_right": r.randint(0, 5)},
            {"logits_soft_cap": r.choice((0.5, 5.0, 30.0))},
            {"chunk_size": r.randint(1, 20)},
            {"window_left": 4, "logits_soft_cap": 3.0, "chunk_size": 7},
        )
    )
    long = [i for i, n in enumerate(lens) if n > 0]
    if long and r.random() < 0.5:
        for _ in range(r.randint(1, 3)):
            request, what = r.choice(long), r.choice("qkkvv")
            first = max(0, lens[request] - queries[request]) if what == "q" else 0
            if first >= lens[request]:
                continue
            heads, width = (
                batch.q.shape[1:] if what == "q" else {"k": batch.k_cache, "v": batch.v_cache}[what].shape[2:]
            )
            poke(
                batch,
                what,
                r.choice((NAN, NAN, INF, -INF)),
                request,
                r.randrange(first, lens[request]),
                r.randrange(heads),
                r.randrange(width),
            )
    if "sinks" in batch.extras and r.random() < 0.3:
        batch.extras["sinks"][r.randrange(batch.q.shape[1])] = r.choice((NAN, INF, -INF))
    return batch, options
