"""Argument checks of ``write_kv`` and ``rope_write_kv``, shared by the reference, the launchers and the
public functions."""

import torch

from torchpaged.custom_ops.cache_write.call import RotatedWriteCall, WriteCall
from torchpaged.custom_ops.checks import (
    check_device,
    check_dims,
    check_dtype,
    check_last_dim,
    check_tensor,
    shape_of,
)
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.memory import check_apart, overlap
from torchpaged.custom_ops.pools import FLOATS, INF, check_cache_dtype, check_pools
from torchpaged.custom_ops.slots import check_positions, check_slots


def check_write_kv(call: WriteCall) -> None:
    """Every argument of ``write_kv``; raises `ArgumentError` before anything is written."""
    k, v, k_cache, v_cache, slot_mapping, *_ = call
    check_pools(k_cache, v_cache, stores=True)
    check_dims("slot_mapping", slot_mapping, None)
    check_dims("k", k, slot_mapping.shape[0], k_cache.shape[2], k_cache.shape[3])
    check_dims("v", v, slot_mapping.shape[0], v_cache.shape[2], v_cache.shape[3])
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_dtype("k", k, *FLOATS)
    check_dtype("v", v, k.dtype)
    check_device(k_cache.device, k=k, v=v, slot_mapping=slot_mapping, **call.scales.by_name)
    check_last_dim(k=k, v=v)
    check_cache_dtype(k, k_cache, call.scales)
    check_apart({"k_cache": k_cache, "v_cache": v_cache}, {"k": k, "v": v}, "pass a copy: .clone()")
    check_slots(slot_mapping, k_cache)


def check_rope_write_kv(call: RotatedWriteCall) -> None:
    """Every argument of ``rope_write_kv``; raises `ArgumentError` before anything is written."""
    check_write_kv(call.write())
    q, k, v, positions, cos_sin, _, q_out, k_cache, v_cache, q_norm, k_norm, norm_eps, norm_offset, *_ = call
    check_dims("q", q, k.shape[0], None, k.shape[2])
    check_dims("q_out", q_out, *q.shape)
    check_dims("positions", positions, q.shape[0])
    check_dims("cos_sin", cos_sin, None, None)
    rotary_dim = cos_sin.shape[1]
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > q.shape[2]:
        raise ArgumentError(
            "cos_sin",
            f"shape [max_position, rotary_dim] with an even rotary_dim in [2, {q.shape[2]}]",
            shape_of(cos_sin),
            "it holds rotary_dim / 2 cosines, then as many sines",
        )
    check_dtype("q", q, *FLOATS)
    check_dtype("k", k, q.dtype)
    if not q.shape[1]:
        raise ArgumentError("q", "at least one head", shape_of(q))
    check_dtype("q_out", q_out, q.dtype)
    check_dtype("positions", positions, torch.int64)
    check_dtype("cos_sin", cos_sin, torch.float32, q.dtype)
    check_last_dim(q=q, q_out=q_out, cos_sin=cos_sin)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_tensor(name, weight, q.shape[2:], q.dtype, torch.float32)
    check_device(
        k_cache.device, q=q, positions=positions, cos_sin=cos_sin, q_out=q_out, q_norm=q_norm, k_norm=k_norm
    )
    if not 0 < norm_eps < INF:
        raise ArgumentError("norm_eps", "a positive finite number", str(norm_eps))
    if norm_offset - norm_offset != 0:
        raise ArgumentError("norm_offset", "a finite number", str(norm_offset))
    if norm_offset and q_norm is None and k_norm is None:
        raise ArgumentError(
            "norm_offset", "0 without q_norm and k_norm", str(norm_offset), "give the weights of the norms"
        )
    check_apart({"k_cache": k_cache, "v_cache": v_cache}, {"q": q, "q_out": q_out}, "pass a copy: .clone()")
    for name, source in (("q", q), ("k", k), ("v", v)):
        if overlap(q_out, source):
            raise ArgumentError(
                "q_out",
                f"memory apart from {name}'s",
                "overlapping tensors",
                "allocate it with torch.empty_like(q)",
            )
    check_positions(positions, cos_sin)
