"""Fake kernels of the cache writes: they state what must fit and compute nothing."""

from collections.abc import Callable

import torch

from torchpaged.custom_ops.cache_write.call import RotatedWriteCall, WriteCall
from torchpaged.custom_ops.facts import expect, expect_dims, expect_dtype
from torchpaged.custom_ops.pools import expect_pools

# Inductor of torch 2.11 reads and writes beyond two halves of one tensor that an op mutates: wrong numbers
# and damaged pools; 2.13 does not, 2.12 was not tried. A view made in inference mode does not name its base,
# but where it begins.
_SPLITS_WRONG = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


def _write_kv(call: WriteCall) -> None:
    k, v, k_cache, v_cache, slot_mapping = call[:5]
    expect(k.dim() == v.dim() == 3, f"k, v: expected 3 dimensions, got {k.dim()} and {v.dim()}")
    expect_pools(k_cache, v_cache)
    for name, x in (("k", k), ("v", v)):  # a view's `_base` is the tensor that owns its memory
        views = x._base is not None and any(
            x._base is cache or x._base is cache._base for cache in (k_cache, v_cache)
        )
        expect(not views, f"{name}: expected memory apart from the pools', got a view of one; pass a copy")
    expect(
        not _SPLITS_WRONG or k_cache.storage_offset() == v_cache.storage_offset(),
        "k_cache, v_cache: expected memory of their own in compiled code, got views that begin at "
        f"{k_cache.storage_offset()} and {v_cache.storage_offset()} of theirs: torch {torch.__version__} "
        "compiles halves of one tensor wrong; make two tensors, or use torch 2.13 or newer",
    )
    expect_dtype(torch.int64, slot_mapping=slot_mapping)
    expect(k.shape[0] == slot_mapping.shape[0], "k, slot_mapping: expected as many slots as tokens")
    heads = k_cache.shape[2]
    expect(k.shape[1] == heads, f"k: expected {heads} heads, got {k.shape[1]}")
    for name, x, dim in (("k", k, k_cache.shape[3]), ("v", v, v_cache.shape[3])):
        expect(x.shape[2] == dim, f"{name}: expected head_dim {dim}, got {x.shape[2]}")


def _rope_write_kv(call: RotatedWriteCall) -> None:
    q, k, _, positions, cos_sin, _, q_out = call[:7]
    _write_kv(call.write())
    expect(q.dim() == q_out.dim() == 3, f"q, q_out: expected 3 dimensions, got {q.dim()}, {q_out.dim()}")
    expect_dims(2, cos_sin=cos_sin)
    expect_dtype(torch.int64, positions=positions)
    expect(q.shape[0] == k.shape[0], "q, k: expected as many tokens")
    expect(q.shape[0] == positions.shape[0], "q, positions: expected as many positions as tokens")
    expect(q.shape[2] == k.shape[2], f"q: expected head_dim {k.shape[2]}, got {q.shape[2]}")
    for d in range(3):
        expect(q_out.shape[d] == q.shape[d], "q_out: expected the shape of q")


FAKES: dict[str, Callable[..., None]] = {"write_kv": _write_kv, "rope_write_kv": _rope_write_kv}
