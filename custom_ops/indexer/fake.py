"""Fake kernels of the indexer's ops: they state what must fit and compute nothing."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchpaged.custom_ops.facts import expect, expect_dims, expect_dtype, expect_rows
from torchpaged.custom_ops.indexer.call import IndexCall


def _expect_pool(states: Tensor, name: str, k_cache: Tensor, k_scale: Tensor | None) -> None:
    expect_dims(4, k_cache=k_cache)
    width = k_cache.shape[3]
    expect(states.shape[-1] == width, f"{name}: expected the pool's width {width}, got {states.shape[-1]}")
    expect_dtype(states.dtype if k_scale is None else torch.float8_e4m3fn, k_cache=k_cache)


def _write_index_keys(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None = None
) -> None:
    expect_dims(2, k=k)
    expect(k.shape[0] == slot_mapping.shape[0], "slot_mapping: expected as many slots as keys")
    _expect_pool(k, "k", k_cache, k_scale)


def _index_logits(call: IndexCall) -> None:
    q, weights, logits = call.q, call.weights, call.logits
    expect_dims(3, q=q)
    _expect_pool(q, "q", call.k_cache, call.k_scale)
    expect(weights.shape == q.shape[:2], "weights: expected one for each head of q")
    expect_rows("q", q.shape[0], logits=logits)
    expect(
        logits.shape[1] == call.block_table.shape[1] * call.k_cache.shape[1],
        f"logits: expected a column for each token of a row of block_table, got {logits.shape[1]}",
    )
    expect_dtype(torch.float32, weights=weights, logits=logits)


def _top_k_indices(logits: Tensor, indices: Tensor) -> None:
    expect_dtype(torch.int32, indices=indices)
    expect_rows("logits", logits.shape[0], indices=indices)


FAKES: dict[str, Callable[..., None]] = {
    "write_index_keys": _write_index_keys,
    "index_logits": _index_logits,
    "top_k_indices": _top_k_indices,
}
