"""Batches, runs and the oracle of ``mla_attention``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.testing.batches import Batch, BatchSpec, make_batch
from torchpaged.testing.oracle import assert_within_budget
from torchpaged.testing.pools import on_host

#: As in the fuzz: in float32 nothing hides in which order products are summed.
_FLOAT32_FACTOR = 6.0


def make_latent_batch(
    spec: BatchSpec, *, rank: int = 32, rope: int = 16, num_heads: int = 4, **options: Any
) -> Batch:
    """`make_batch` over one pool of latents: ``k_cache [num_blocks, block_size, 1, rank + rope]``, of which
    ``v_cache`` is a view.

    Args:
        spec: lengths of the requests.
        rank, rope: columns of a latent and of a rotated key.
        num_heads: of the queries.
        options: as for `make_batch`.
    """
    batch = make_batch(
        spec, num_heads=num_heads, num_kv_heads=1, head_dim=rank + rope, head_dim_v=rank, **options
    )
    return replace(batch, v_cache=batch.k_cache[..., :rank])


def run_mla_attention(ops: BackendOps, batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
    """Call one backend's op on a `make_latent_batch`; outputs start as NaN; returns ``(out, lse)``."""
    shape = (*batch.q.shape[:2], batch.v_cache.shape[-1])
    out = torch.full(shape, float("nan"), dtype=batch.q.dtype, device=batch.q.device)
    lse = torch.full(shape[:2], float("nan"), dtype=torch.float32, device=batch.q.device)
    ops.mla_attention(
        batch.q,
        batch.k_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        out,
        lse,
        max_query_len=batch.max_query_len,
        scale=batch.scale,
        **options,
    )
    return out, lse


@on_host
def assert_latent_close(out: Tensor, lse: Tensor | None, batch: Batch, **options: Any) -> None:
    """``out`` and ``lse`` of a kernel against `paged_attention`'s reference in float64, keys and values in
    pools of their own, within the error budget of the batch's dtype."""
    rank = batch.v_cache.shape[-1]
    cpu = batch.to("cpu")
    pool = cpu.k_cache.double()
    exact, exact_lse = (
        torch.full((*cpu.q.shape[:2], rank), float("nan"), dtype=torch.float64),
        torch.full(cpu.q.shape[:2], float("nan"), dtype=torch.float32),
    )
    BACKEND_OPS["reference"].paged_attention(
        cpu.q.double(),
        pool,
        pool[..., :rank].clone(),
        cpu.block_table,
        cpu.seq_lens,
        cpu.query_start_loc,
        exact,
        exact_lse,
        max_query_len=cpu.max_query_len,
        scale=cpu.scale,
        **options,
    )
    same, _ = run_mla_attention(BACKEND_OPS["reference"], cpu, **options)
    factor = _FLOAT32_FACTOR if batch.q.dtype == torch.float32 else 2.0
    assert_within_budget(f"out[{batch.spec.name}]", out, same, exact, batch.q.dtype, factor)
    if lse is not None:
        rounding = torch.float16 if batch.q.dtype != torch.float32 else torch.float32
        assert_within_budget(f"lse[{batch.spec.name}]", lse, exact_lse, exact_lse, rounding)
