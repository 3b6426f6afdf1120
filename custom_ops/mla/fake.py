"""Fake kernels of latent attention: they state what must fit and compute nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchpaged.custom_ops.batch_values import expect_batch
from torchpaged.custom_ops.early_launch import refuse_inductors_for
from torchpaged.custom_ops.mla.call import LatentCall, LatentWriteCall
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


def _rope_write_latent(call: LatentWriteCall) -> None:
    q, kv_c, k_pe, positions, cos_sin, _, up_keys, q_out = call[:8]
    _write_latent(*call.write())
    dims = [tensor.dim() for tensor in (q, up_keys, q_out, cos_sin)]
    torch._check(dims == [3, 3, 3, 2], lambda: f"q, up_keys, q_out, cos_sin: got {dims} dimensions")
    torch._check(positions.dtype == torch.int64, lambda: f"positions: expected int64, got {positions.dtype}")
    for name, tensor in (("q", q), ("q_out", q_out), ("positions", positions)):
        torch._check(
            tensor.shape[0] == kv_c.shape[0], lambda name=name: f"{name}: expected as many tokens as kv_c"
        )
    for name, tensor in (("q", q), ("q_out", q_out)):
        torch._check(
            tensor.shape[1] == up_keys.shape[0], lambda name=name: f"{name}: expected the heads of up_keys"
        )
        torch._check(tensor.dtype == kv_c.dtype, lambda name=name: f"{name}: expected the dtype of kv_c")
    rope = k_pe.shape[1]
    torch._check(up_keys.shape[2] == kv_c.shape[1], lambda: "up_keys: expected as many columns as kv_c")
    torch._check(q.shape[2] == up_keys.shape[1] + rope, lambda: "q: expected the rows of up_keys and of k_pe")
    torch._check(q_out.shape[2] == kv_c.shape[1] + rope, lambda: "q_out: expected columns of kv_c and k_pe")
    torch._check(cos_sin.shape[1] == rope, lambda: "cos_sin: expected as many columns as k_pe")


FAKES: dict[str, Callable[..., None]] = {
    "mla_attention": _mla_attention,
    "write_latent": _write_latent,
    "rope_write_latent": _rope_write_latent,
}
