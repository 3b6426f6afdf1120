"""Fake kernels of latent attention: they state what must fit and compute nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchpaged.custom_ops.batch_values import expect_batch
from torchpaged.custom_ops.early_launch import refuse_inductors_for
from torchpaged.custom_ops.mla.call import LatentCall


def _expect_pool(kv_cache: Tensor) -> None:
    torch._check(kv_cache.dim() == 4, lambda: f"kv_cache: expected 4 dimensions, got {kv_cache.dim()}")
    torch._check(kv_cache.shape[2] == 1, lambda: f"kv_cache: expected 1 kv head, got {kv_cache.shape[2]}")


def _mla_attention(call: LatentCall) -> None:
    q, kv_cache, block_table, seq_lens, query_start_loc, out = call[:6]
    expect_batch(q, out, block_table, seq_lens, query_start_loc)
    _expect_pool(kv_cache)
    for name, dtype in (("kv_cache", kv_cache.dtype), ("out", out.dtype)):
        torch._check(q.dtype == dtype, lambda name=name, got=dtype: f"{name}: expected {q.dtype}, got {got}")
    torch._check(
        q.shape[2] == kv_cache.shape[3],
        lambda: f"q: expected the pool's width {kv_cache.shape[3]}, got {q.shape[2]}",
    )
    torch._check(
        out.shape[2] <= kv_cache.shape[3],
        lambda: f"out: expected at most the pool's width {kv_cache.shape[3]}, got {out.shape[2]}",
    )
    torch._check(q.shape[1] == out.shape[1], lambda: "out: expected as many heads as q")
    if (indices := call.indices) is not None:
        torch._check(
            indices.dtype == torch.int32, lambda: f"indices: expected torch.int32, got {indices.dtype}"
        )
        torch._check(indices.dim() == 2, lambda: f"indices: expected 2 dimensions, got {indices.dim()}")
        torch._check(indices.shape[0] == q.shape[0], lambda: "indices: expected as many tokens as q")


def _write_latent(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    refuse_inductors_for(kv_c)
    torch._check(
        kv_c.dim() == 2 and k_pe.dim() == 2,
        lambda: f"kv_c, k_pe: expected 2 dimensions, got {kv_c.dim()} and {k_pe.dim()}",
    )
    _expect_pool(kv_cache)
    torch._check(
        slot_mapping.dtype == torch.int64, lambda: f"slot_mapping: expected int64, got {slot_mapping.dtype}"
    )
    for name, x in (("kv_c", kv_c), ("k_pe", k_pe)):
        torch._check(
            x.dtype == kv_cache.dtype,
            lambda name=name, x=x: f"{name}: expected {kv_cache.dtype}, got {x.dtype}",
        )
        torch._check(
            x.shape[0] == slot_mapping.shape[0],
            lambda name=name: f"{name}, slot_mapping: expected as many slots as tokens",
        )
    torch._check(
        kv_c.shape[1] + k_pe.shape[1] == kv_cache.shape[3],
        lambda: f"kv_c, k_pe: expected {kv_cache.shape[3]} columns, got {kv_c.shape[1]} and {k_pe.shape[1]}",
    )


FAKES: dict[str, Callable[..., None]] = {"mla_attention": _mla_attention, "write_latent": _write_latent}
