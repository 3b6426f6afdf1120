"""Fake kernels of latent attention: they state what must fit and compute nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchpaged.custom_ops.batch_values import expect_batch
from torchpaged.custom_ops.early_launch import refuse_inductors_for
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, row_bytes
from torchpaged.custom_ops.pools import FLOATS


def _expect_pool(kv_cache: Tensor, name: str, x: Tensor) -> None:
    """A pool, and the dtype of ``x``."""
    torch._check(kv_cache.dim() == 4, lambda: f"kv_cache: expected 4 dimensions, got {kv_cache.dim()}")
    torch._check(kv_cache.shape[2] == 1, lambda: f"kv_cache: expected 1 kv head, got {kv_cache.shape[2]}")
    fits = x.dtype in FLOATS if kv_cache.dtype == ROW_DTYPE else x.dtype == kv_cache.dtype
    torch._check(fits, lambda: f"{name}: expected the pool's {kv_cache.dtype}, got {x.dtype}")


def _width(kv_cache: Tensor, rank: int, rope: int) -> int:
    """Of a row of a pool for such columns."""
    return row_bytes(rank, rope) if kv_cache.dtype == ROW_DTYPE else rank + rope


def _mla_attention(call: LatentCall) -> None:
    q, kv_cache, block_table, seq_lens, query_start_loc, out = call[:6]
    expect_batch(q, out, block_table, seq_lens, query_start_loc)
    _expect_pool(kv_cache, "q", q)
    wanted = q.dtype if call.output_scale is None else torch.float8_e4m3fn
    torch._check(out.dtype == wanted, lambda: f"out: expected {wanted}, got {out.dtype}")
    width, rank = q.shape[2], out.shape[2]
    torch._check(rank <= width, lambda: f"out: expected at most the queries' width {width}, got {rank}")
    torch._check(
        _width(kv_cache, rank, width - rank) == kv_cache.shape[3],
        lambda: f"q: expected what fits the pool's width {kv_cache.shape[3]}, got {width}",
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
    _expect_pool(kv_cache, "kv_c", kv_c)
    torch._check(k_pe.dtype == kv_c.dtype, lambda: f"k_pe: expected {kv_c.dtype}, got {k_pe.dtype}")
    torch._check(
        slot_mapping.dtype == torch.int64, lambda: f"slot_mapping: expected int64, got {slot_mapping.dtype}"
    )
    for name, x in (("kv_c", kv_c), ("k_pe", k_pe)):
        torch._check(
            x.shape[0] == slot_mapping.shape[0],
            lambda name=name: f"{name}, slot_mapping: expected as many slots as tokens",
        )
    torch._check(
        _width(kv_cache, kv_c.shape[1], k_pe.shape[1]) == kv_cache.shape[3],
        lambda: f"kv_c, k_pe: expected a row of {kv_cache.shape[3]}, got {kv_c.shape[1]} and {k_pe.shape[1]}",
    )


FAKES: dict[str, Callable[..., None]] = {"mla_attention": _mla_attention, "write_latent": _write_latent}
