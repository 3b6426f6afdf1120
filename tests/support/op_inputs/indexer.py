"""Inputs and the oracle of the indexer's ops."""

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BackendOps
from torchpaged.testing.batches import Batch, BatchSpec, make_batch


def make_index_batch(spec: BatchSpec, *, width: int = 24, num_heads: int = 5, **options: Any) -> Batch:
    """`make_batch` whose ``k_cache [num_blocks, block_size, 1, width]`` holds the indexer's keys."""
    sizes = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": width, "head_dim_v": width}
    return make_batch(spec, **sizes, block_size=options.pop("block_size", 4), **options)


def weights_of(batch: Batch) -> Tensor:
    """One weight for each head of each token."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch.q.shape[:2], generator=generator, dtype=torch.float32).to(batch.q.device)


def run_index_logits(ops: BackendOps, batch: Batch, weights: Tensor | None = None, **options: Any) -> Tensor:
    """Call one backend's ``index_logits``; the logits start as NaN. ``weights``: made before a capture,
    `weights_of` by default."""
    columns = batch.block_table.shape[1] * batch.k_cache.shape[1]
    logits = torch.full((batch.q.shape[0], columns), float("nan"), dtype=torch.float32, device=batch.q.device)
    tensors = batch.k_cache, batch.block_table, batch.seq_lens, batch.query_start_loc
    weights = weights_of(batch) if weights is None else weights
    ops.index_logits(batch.q, weights, *tensors, logits, max_query_len=batch.max_query_len, **options)
    return logits


def exact_logits(batch: Batch, causal: bool = True, k_scale: Tensor | None = None) -> Tensor:
    """What ``index_logits`` should give, in float64, one token after the other."""
    cpu, weights = batch.to("cpu"), weights_of(batch).cpu().double()
    block_size, keys = cpu.k_cache.shape[1], cpu.k_cache[:, :, 0].double()
    if k_scale is not None:
        keys = keys * k_scale.cpu().double()[..., None]
    exact = torch.full((cpu.q.shape[0], cpu.block_table.shape[1] * block_size), float("-inf")).double()
    starts = cpu.query_start_loc.tolist()
    for request, length in enumerate(cpu.seq_lens.tolist()):
        for token in range(starts[request], starts[request + 1]):
            position = length - starts[request + 1] + token
            seen = torch.arange(0 if position < 0 else position + 1 if causal else length)
            rows = keys[cpu.block_table[request, seen // block_size].long(), seen % block_size]
            scores = (rows @ cpu.q[token].double().T).clamp_min(0)
            exact[token, : len(seen)] = scores @ weights[token]
    return exact


def is_top_k(indices: Tensor, logits: Tensor) -> bool:
    """Whether each row of ``indices`` has positions of a largest set of ``logits``, and -1 else."""
    for row, values in zip(indices.cpu().tolist(), logits.cpu(), strict=True):
        taken = [n for n in row if n >= 0]
        finite = int((values > float("-inf")).sum())
        if len(set(taken)) != len(taken) or len(taken) != min(finite, len(row)):
            return False
        want = values.sort(descending=True).values[: len(taken)]
        if not torch.equal(values[taken].sort(descending=True).values, want):
            return False
    return True
