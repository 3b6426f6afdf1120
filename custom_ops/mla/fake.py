"""Fake kernels of what `torchpaged.layers.MLAAttention` calls: they state what must fit."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchpaged.custom_ops.batch_values import expect_batch
from torchpaged.custom_ops.facts import expect, expect_dims, expect_dtype
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, row_bytes
from torchpaged.custom_ops.pools import FLOATS


def _expect_pool(kv_cache: Tensor, name: str, x: Tensor) -> None:
    """A pool, and the dtype of ``x``."""
    expect_dims(4, kv_cache=kv_cache)
    expect(kv_cache.shape[2] == 1, f"kv_cache: expected 1 kv head, got {kv_cache.shape[2]}")
    fits = x.dtype in FLOATS if kv_cache.dtype == ROW_DTYPE else x.dtype == kv_cache.dtype
    expect(fits, f"{name}: expected the pool's {kv_cache.dtype}, got {x.dtype}")


def _width(kv_cache: Tensor, rank: int, rope: int) -> int:
    """Of a row of a pool for such columns."""
    return row_bytes(rank, rope) if kv_cache.dtype == ROW_DTYPE else rank + rope


def _mla_attention(call: LatentCall) -> None:
    q, kv_cache, block_table, seq_lens, query_start_loc, out = call[:6]
    expect_batch(q, out, block_table, seq_lens, query_start_loc)
    _expect_pool(kv_cache, "q", q)
    expect_dtype(q.dtype if call.output_scale is None else torch.float8_e4m3fn, out=out)
    width, rank, pool_width = q.shape[2], out.shape[2], kv_cache.shape[3]
    expect(rank <= width, f"out: expected at most the queries' width {width}, got {rank}")
    fits = _width(kv_cache, rank, width - rank) == pool_width
    expect(fits, f"q: expected what fits the pool's width {pool_width}, got {width}")
    expect(q.shape[1] == out.shape[1], "out: expected as many heads as q")
    if (indices := call.indices) is not None:
        expect_dtype(torch.int32, indices=indices)
        expect_dims(2, indices=indices)
        expect(indices.shape[0] == q.shape[0], "indices: expected as many tokens as q")


def _write_latent(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    dims = kv_c.dim(), k_pe.dim()
    expect(dims == (2, 2), f"kv_c, k_pe: expected 2 dimensions, got {dims[0]} and {dims[1]}")
    _expect_pool(kv_cache, "kv_c", kv_c)
    expect_dtype(kv_c.dtype, k_pe=k_pe)
    expect_dtype(torch.int64, slot_mapping=slot_mapping)
    for name, x in (("kv_c", kv_c), ("k_pe", k_pe)):
        fits = x.shape[0] == slot_mapping.shape[0]
        expect(fits, f"{name}, slot_mapping: expected as many slots as tokens")
    rank, rope, width = kv_c.shape[1], k_pe.shape[1], kv_cache.shape[3]
    fits = _width(kv_cache, rank, rope) == width
    expect(fits, f"kv_c, k_pe: expected a row of {width}, got {rank} and {rope}")


FAKES: dict[str, Callable[..., None]] = {"mla_attention": _mla_attention, "write_latent": _write_latent}
