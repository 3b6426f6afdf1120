"""Batches, runs and the oracle of ``mla_attention``."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, pack, unpack
from torchpaged.testing.batches import Batch, BatchSpec, make_batch, on_host
from torchpaged.testing.oracle import assert_within_budget

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


def as_fp8(batch: Batch) -> Batch:
    """A `make_latent_batch` whose pool has rows of fp8 with the same numbers, rounded; what is NaN stays NaN.
    Between rows lie 16 bytes that belong to none."""
    rank, (num_blocks, block_size, _, width) = batch.v_cache.shape[-1], batch.k_cache.shape
    latents, keys = batch.k_cache.reshape(-1, width).split((rank, width - rank), dim=1)
    rows = pack(latents, keys).view(torch.uint8).view(num_blocks, block_size, 1, -1)
    pool = torch.full((*rows.shape[:3], rows.shape[3] + 16), 0x7F, dtype=torch.uint8, device=rows.device)
    pool = pool[..., : rows.shape[3]]
    return replace(batch, k_cache=pool.copy_(rows).view(ROW_DTYPE))


def of_size(batch: Batch, power: int) -> Batch:
    """A `make_latent_batch` with latents times 2^``power`` and queries over it: the same scores."""
    pool = batch.k_cache * 2.0**power
    return replace(batch, q=batch.q * 2.0**-power, k_cache=pool, v_cache=pool[..., : batch.v_cache.shape[-1]])


def numbers_of(batch: Batch) -> Tensor:
    """A batch's pool in float64, exactly."""
    pool = batch.k_cache
    return unpack(pool, batch.v_cache.shape[-1], torch.float64) if pool.dtype == ROW_DTYPE else pool.double()


def latent_tensors(batch: Batch) -> tuple[Tensor, ...]:
    """What every call over latents takes by place."""
    return batch.q, batch.k_cache, *batch.tensors[3:]


def run_mla_attention(ops: BackendOps, batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
    """Call one backend's op on a `make_latent_batch`; outputs start as NaN; returns ``(out, lse)``."""
    shape = (*batch.q.shape[:2], batch.v_cache.shape[-1])
    out = torch.full(shape, float("nan"), dtype=batch.q.dtype, device=batch.q.device)
    lse = torch.full(shape[:2], float("nan"), dtype=torch.float32, device=batch.q.device)
    ops.mla_attention(
        *latent_tensors(batch), out, lse, max_query_len=batch.max_query_len, scale=batch.scale, **options
    )
    return out, lse


@on_host()
def assert_latent_close(out: Tensor, lse: Tensor | None, batch: Batch, **options: Any) -> None:
    """``out`` and ``lse`` of a kernel against `paged_attention`'s reference in float64, where the batch is,
    keys and values in pools of their own, within the error budget of the batch's dtype."""
    rank, device = batch.v_cache.shape[-1], batch.q.device
    pool = numbers_of(batch)
    exact, exact_lse = (
        torch.full((*batch.q.shape[:2], rank), float("nan"), dtype=torch.float64, device=device),
        torch.full(batch.q.shape[:2], float("nan"), dtype=torch.float32, device=device),
    )
    BACKEND_OPS["reference"].paged_attention(
        batch.q.double(),
        pool,
        pool[..., :rank].clone(),
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        exact,
        exact_lse,
        max_query_len=batch.max_query_len,
        scale=batch.scale,
        **options,
    )
    same, _ = run_mla_attention(BACKEND_OPS["reference"], batch, **options)
    factor = _FLOAT32_FACTOR if batch.q.dtype == torch.float32 else 2.0
    assert_within_budget(f"out[{batch.spec.name}]", out, same, exact, batch.q.dtype, factor)
    if lse is not None:
        rounding = torch.float16 if batch.q.dtype != torch.float32 else torch.float32
        assert_within_budget(f"lse[{batch.spec.name}]", lse, exact_lse, exact_lse, rounding)


#: Kinds of `selected` positions.
SELECTIONS = ("some", "tails", "all", "twice", "beyond", "none")


def selected(batch: Batch, kind: str, top_k: int = 11) -> Tensor:
    """``[num_tokens, top_k]`` int32 for ``batch``, in random order, by ``kind``: "some" of what a token sees,
    with -1 behind them where it sees fewer; "tails" of -1, as many as half; "all" that it sees, as far as
    there is room, between entries of -1; "twice" the same ones; ones "beyond" what it sees among the others;
    "none", all of them negative. Rows behind the last request are garbage."""
    generator = torch.Generator().manual_seed(len(kind))
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    indices = torch.randint(-9, 1 << 20, (batch.q.shape[0], top_k), generator=generator)
    for request, length in enumerate(lengths):
        for token in range(starts[request], starts[request + 1]):
            end = max(length - starts[request + 1] + token + 1, 0)
            order = torch.randperm(end, generator=generator)[: top_k // 2 if kind == "tails" else top_k]
            row = torch.full((top_k,), -1)
            row[: len(order)] = order
            if kind == "all":
                row = row[torch.randperm(top_k, generator=generator)]
            elif kind == "twice" and end:
                row = order[torch.randint(len(order), (top_k,), generator=generator)]
            elif kind == "beyond":
                row[1::2] = torch.randint(end, end + 70, (top_k // 2,), generator=generator)
            elif kind == "none":
                row = -1 - torch.arange(top_k)
            indices[token] = row
    return indices.to(torch.int32).to(batch.q.device)


@on_host()
def assert_sparse_close(out: Tensor, lse: Tensor, batch: Batch, indices: Tensor, causal: bool = True) -> None:
    """``out`` and ``lse`` of a kernel with ``indices`` against softmax in float64 on the CPU, one token after
    the other, within the error budget of the batch's dtype. The reference that the budget is made of, which
    repeats keys for every head, runs where the batch is."""
    rank = batch.v_cache.shape[-1]
    cpu, chosen = batch.to("cpu"), indices.cpu().long()
    pool, starts = numbers_of(cpu)[:, :, 0], cpu.query_start_loc.tolist()
    block_size = pool.shape[1]
    exact = torch.zeros(*cpu.q.shape[:2], rank, dtype=torch.float64)
    exact_lse = torch.full(cpu.q.shape[:2], float("-inf"), dtype=torch.float64)
    for request, length in enumerate(cpu.seq_lens.tolist()):
        for token in range(starts[request], starts[request + 1]):
            position = length - starts[request + 1] + token
            end = 0 if position < 0 else position + 1 if causal else length
            keys = chosen[token][(chosen[token] >= 0) & (chosen[token] < end)]
            if not len(keys):
                continue
            rows = pool[cpu.block_table[request, keys // block_size].long(), keys % block_size]
            scores = cpu.q[token].double() @ rows.T * batch.scale
            exact[token] = scores.softmax(-1) @ rows[:, :rank]
            exact_lse[token] = scores.logsumexp(-1)
    same, same_lse = run_mla_attention(BACKEND_OPS["reference"], batch, indices=indices, causal=causal)
    factor = _FLOAT32_FACTOR if batch.q.dtype == torch.float32 else 2.0
    assert_within_budget(f"out[{batch.spec.name}]", out, same, exact, batch.q.dtype, factor)
    rounding = torch.float16 if batch.q.dtype != torch.float32 else torch.float32
    assert_within_budget(f"lse[{batch.spec.name}]", lse, same_lse, exact_lse, rounding)
