"""Argument checks of latent attention's ops, shared by the reference, the kernels and the
public functions."""

import torch
from torch import Tensor

from torchpaged.custom_ops.batch_values import check_batch, check_batch_values, check_results
from torchpaged.custom_ops.checks import (
    check_device,
    check_dims,
    check_dtype,
    check_last_dim,
    check_softmax,
    given,
    reads_values,
    shape_of,
)
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.memory import check_apart, check_own_elements
from torchpaged.custom_ops.mla.call import LatentCall, LatentWriteCall
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, check_rows
from torchpaged.custom_ops.pools import FLOATS, INF, check_scale
from torchpaged.custom_ops.slots import check_positions, check_slots

#: Of `rope_write_latent`: which numbers of a rotated part turn together, and where they are stored.
ROTATIONS = ("halves", "pairs", "pairs_to_halves")


def _check_pool(kv_cache: Tensor) -> None:
    if kv_cache.dim() != 4 or kv_cache.shape[2] != 1:
        raise ArgumentError("kv_cache", "shape [num_blocks, block_size, 1, rank + rope]", shape_of(kv_cache))
    if min(kv_cache.shape) < 1:
        raise ArgumentError("kv_cache", "at least one block, token per block and column", shape_of(kv_cache))
    check_dtype("kv_cache", kv_cache, *FLOATS, ROW_DTYPE)
    check_last_dim(kv_cache=kv_cache)


def _states_of(kv_cache: Tensor) -> tuple[torch.dtype, ...]:
    """Dtypes that queries and tokens may have over a pool."""
    return FLOATS if kv_cache.dtype == ROW_DTYPE else (kv_cache.dtype,)


def check_mla_attention(call: LatentCall) -> None:
    """Every argument of ``mla_attention``; raises `ArgumentError` before anything is written."""
    q, kv_cache, block_table, seq_lens, query_start_loc, out, lse = call[:7]
    _check_pool(kv_cache)
    fp8 = kv_cache.dtype == ROW_DTYPE
    check_dims("q", q, None, None, None if fp8 else kv_cache.shape[3])
    if not q.shape[1]:
        raise ArgumentError("q", "at least one head", shape_of(q))
    check_dtype("q", q, *_states_of(kv_cache))
    check_dims("out", out, q.shape[0], q.shape[1], None)
    check_dtype("out", out, q.dtype if call.output_scale is None else ROW_DTYPE)
    rank, width = out.shape[2], q.shape[2]
    if not 0 < rank < width:
        raise ArgumentError(
            "out",
            f"rank columns, at least 1 and fewer than the queries' {width} (rank + rope)",
            f"{rank} columns",
        )
    if fp8:
        check_rows(kv_cache, rank, width - rank)
    read = given(indices=call.indices, output_scale=call.output_scale)
    check_results(q, out, lse, kv_cache=kv_cache, **read)
    batch = check_batch(block_table, seq_lens, query_start_loc, call.max_query_len)
    check_last_dim(q=q, out=out)
    check_device(kv_cache.device, q=q, out=out, lse=lse, **batch)
    if call.output_scale is not None:
        check_scale("output_scale", call.output_scale, 1)
        check_device(q.device, output_scale=call.output_scale)
    if call.indices is not None:
        _check_indices(call.indices, q)
    check_softmax(call.scale)
    if reads_values(q.device):
        check_batch_values(q.shape[0], kv_cache, block_table, seq_lens, query_start_loc, call.max_query_len)


def _check_indices(indices: Tensor, q: Tensor) -> None:
    check_dims("indices", indices, q.shape[0], None)
    if not indices.shape[1]:
        raise ArgumentError("indices", "at least one position per token", shape_of(indices))
    check_dtype("indices", indices, torch.int32)
    check_last_dim(indices=indices)
    check_device(q.device, indices=indices)


def check_write_latent(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Every argument of ``write_latent``; raises `ArgumentError` before anything is written."""
    _check_pool(kv_cache)
    check_dims("slot_mapping", slot_mapping, None)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    for name, x, dtypes in (("kv_c", kv_c, _states_of(kv_cache)), ("k_pe", k_pe, (kv_c.dtype,))):
        check_dims(name, x, slot_mapping.shape[0], None)
        check_dtype(name, x, *dtypes)
        check_last_dim(**{name: x})
    rank, rope, fp8 = kv_c.shape[1], k_pe.shape[1], kv_cache.dtype == ROW_DTYPE
    if not rank or not rope or not (fp8 or rank + rope == kv_cache.shape[3]):
        together = "" if fp8 else f", {kv_cache.shape[3]} together, as the pool has"
        raise ArgumentError("kv_c, k_pe", f"at least one column each{together}", f"{rank} and {rope} columns")
    if fp8:
        check_rows(kv_cache, rank, rope)
    check_device(kv_cache.device, kv_c=kv_c, k_pe=k_pe, slot_mapping=slot_mapping)
    check_apart({"kv_cache": kv_cache}, {"kv_c": kv_c, "k_pe": k_pe}, "pass a copy: .clone()")
    check_slots(slot_mapping, kv_cache)


def check_rope_write_latent(call: LatentWriteCall) -> None:
    """Every argument of ``rope_write_latent``; raises `ArgumentError` before anything is written."""
    check_write_latent(*call.write())
    q, kv_c, k_pe, positions, cos_sin, _, up_keys, q_out, kv_cache = call[:9]
    (tokens, rank), rope = kv_c.shape, k_pe.shape[1]
    if rope % 2:
        raise ArgumentError("k_pe", "an even number of rotated columns", str(rope))
    check_dims("up_keys", up_keys, None, None, rank)
    num_heads, nope, _ = up_keys.shape
    if not num_heads or not nope:
        raise ArgumentError("up_keys", "at least one head and one row each", shape_of(up_keys))
    check_dims("q", q, tokens, num_heads, nope + rope)
    check_dims("q_out", q_out, tokens, num_heads, rank + rope)
    check_dims("positions", positions, tokens)
    check_dims("cos_sin", cos_sin, None, rope)
    for name, tensor, dtypes in (
        ("q", q, (kv_c.dtype,)),
        ("up_keys", up_keys, (kv_c.dtype,)),
        ("q_out", q_out, (kv_c.dtype,)),
        ("positions", positions, (torch.int64,)),
        ("cos_sin", cos_sin, (torch.float32, kv_c.dtype)),
    ):
        check_dtype(name, tensor, *dtypes)
    check_last_dim(q=q, up_keys=up_keys, q_out=q_out, cos_sin=cos_sin)
    norm = given(kv_norm=call.kv_norm)
    for name, weight in norm.items():
        check_dims(name, weight, rank)
        check_dtype(name, weight, kv_c.dtype, torch.float32)
        check_last_dim(**{name: weight})
    if not 0 < call.norm_eps < INF:
        raise ArgumentError("norm_eps", "a positive finite number", str(call.norm_eps))
    if call.rotation not in ROTATIONS:
        raise ArgumentError("rotation", " or ".join(map(repr, ROTATIONS)), repr(call.rotation))
    read = {"q": q, "up_keys": up_keys, "cos_sin": cos_sin, **norm}
    check_device(kv_cache.device, q_out=q_out, positions=positions, **read)
    check_own_elements("q_out", q_out)
    check_apart({"kv_cache": kv_cache}, {**read, "q_out": q_out}, "pass a copy: .clone()")
    check_apart({"q_out": q_out}, {**read, "kv_c": kv_c, "k_pe": k_pe}, "allocate it with torch.empty")
    check_positions(positions, cos_sin)


def check_up_project_values(latents: Tensor, up_values: Tensor, out: Tensor) -> None:
    """Every argument of ``up_project_values``; raises `ArgumentError` before anything is written."""
    check_dims("latents", latents, None, None, None)
    tokens, num_heads, rank = latents.shape
    check_dims("up_values", up_values, num_heads, None, rank)
    if not up_values.numel():
        raise ArgumentError("up_values", "at least one head, row and column", shape_of(up_values))
    check_dims("out", out, tokens, num_heads, up_values.shape[1])
    check_dtype("latents", latents, *FLOATS)
    for name, tensor in (("up_values", up_values), ("out", out)):
        check_dtype(name, tensor, latents.dtype)
    check_last_dim(latents=latents, up_values=up_values, out=out)
    check_device(latents.device, up_values=up_values, out=out)
    check_own_elements("out", out)
    check_apart({"out": out}, {"latents": latents, "up_values": up_values}, "allocate it with torch.empty")


def as_keys_and_values(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``k, v, k_cache, v_cache`` of ``write_kv``: latents and rotated keys, one head each, and the columns
    of the pool where either belongs. They share no element."""
    rank = kv_c.shape[1]
    return kv_c[:, None], k_pe[:, None], kv_cache[..., :rank], kv_cache[..., rank:]
