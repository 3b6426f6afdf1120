"""Fake kernels of the indexer's ops: they state what must fit and compute nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchpaged.custom_ops.indexer.call import IndexCall


def _expect_pool(states: Tensor, name: str, k_cache: Tensor, k_scale: Tensor | None) -> None:
    torch._check(k_cache.dim() == 4, lambda: f"k_cache: expected 4 dimensions, got {k_cache.dim()}")
    torch._check(
        states.shape[-1] == k_cache.shape[3],
        lambda: f"{name}: expected the pool's width {k_cache.shape[3]}, got {states.shape[-1]}",
    )
    dtype = states.dtype if k_scale is None else torch.float8_e4m3fn
    torch._check(k_cache.dtype == dtype, lambda: f"k_cache: expected {dtype}, got {k_cache.dtype}")


def _write_index_keys(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None = None
) -> None:
    torch._check(k.dim() == 2, lambda: f"k: expected 2 dimensions, got {k.dim()}")
    torch._check(k.shape[0] == slot_mapping.shape[0], lambda: "slot_mapping: expected as many slots as keys")
    _expect_pool(k, "k", k_cache, k_scale)


def _index_logits(call: IndexCall) -> None:
    q, weights, logits = call.q, call.weights, call.logits
    torch._check(q.dim() == 3, lambda: f"q: expected 3 dimensions, got {q.dim()}")
    _expect_pool(q, "q", call.k_cache, call.k_scale)
    torch._check(weights.shape == q.shape[:2], lambda: "weights: expected one for each head of q")
    torch._check(logits.shape[0] == q.shape[0], lambda: "logits: expected as many rows as q")
    torch._check(
        logits.shape[1] == call.block_table.shape[1] * call.k_cache.shape[1],
        lambda: f"logits: expected a column for each token of a row of block_table, got {logits.shape[1]}",
    )
    for name, x in (("weights", weights), ("logits", logits)):
        torch._check(
            x.dtype == torch.float32, lambda name=name, x=x: f"{name}: expected torch.float32, got {x.dtype}"
        )


def _top_k_indices(logits: Tensor, indices: Tensor) -> None:
    torch._check(indices.dtype == torch.int32, lambda: f"indices: expected int32, got {indices.dtype}")
    torch._check(indices.shape[0] == logits.shape[0], lambda: "indices: expected as many rows as logits")


FAKES: dict[str, Callable[..., None]] = {
    "write_index_keys": _write_index_keys,
    "index_logits": _index_logits,
    "top_k_indices": _top_k_indices,
}
