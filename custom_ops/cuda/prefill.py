"""Prefill attention of the ``cuda`` backend on Hopper: which calls ``prefill.cu`` takes, its macros, tensor maps and launch.

What the copy engine knows of the caches is made once per pool (their addresses, shapes and strides) and kept: pools do not move.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.cuda import jit, specialise

_PARAMS = struct.Struct("7Q5qf3i16x")  # struct Params of prefill_shapes.cuh behind its three maps
KEYS, ROWS, THREADS = 128, 128, 384  # of a step, of a tile, of a CTA; as in prefill_shapes.cuh
DIMS = (64, 128)
_RING_BYTES = 160 << 10
_MAX_COORDINATE = 2**31 - 1


def refuse(
    dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, dim_v: int, group: int, block_size: int, compute: tuple[int, int], *,
    scale: float = 1.0, window: bool = False, chunk: bool = False, soft_cap: bool = False, alibi: bool = False, sinks: bool = False,
    scales: bool = False,
) -> str | None:  # fmt: skip
    """Why the kernel can't take these numbers and features, or None. ``compute``: the device's compute capability."""
    if compute != (9, 0):
        return f"compute capability {compute[0]}.{compute[1]}: the kernel is written for 9.0"
    if dtype not in (torch.bfloat16, torch.float16) or kv_dtype != dtype:
        return f"dtypes {dtype} and {kv_dtype}"
    if dim not in DIMS or dim_v != dim:
        return f"head_dim {dim}/{dim_v}"
    if block_size % 8 or KEYS % block_size:
        return f"block_size {block_size}: not a divisor of {KEYS} that is a multiple of 8"
    if not 1 <= group <= ROWS:
        return f"{group} query heads per kv head"
    if not scale > 0:
        return f"scale {scale}: a row's largest score is sought before it is scaled"
    features = {
        "window": window,
        "chunk_size": chunk,
        "logits_soft_cap": soft_cap,
        "alibi_slopes": alibi,
        "sinks": sinks,
        "k_scale": scales,
    }
    return next((name for name, asked in features.items() if asked), None)


def refuse_layout(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> str | None:
    """Why the kernel can't read or write tensors that lie like these, or None. Shapes, strides and addresses only."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        block_size, _, dim = cache.shape[1:]
        if cache.stride(3) != 1 or cache.stride(2) != dim or cache.stride(0) != block_size * cache.stride(1):
            return f"{name} with strides {tuple(cache.stride())}: heads side by side and blocks behind each other are needed"
        if cache.data_ptr() % 16 or cache.stride(1) % 8:
            return f"{name} does not begin at multiples of 16 bytes"
        if cache.shape[0] * block_size // 8 > _MAX_COORDINATE:
            return f"{name} with {cache.shape[0]} blocks"
    for name, rows in (("q", q), ("out", out)):
        if rows.data_ptr() % 16 or rows.stride(0) % 8 or rows.stride(1) % 8 or rows.stride(2) != 1:
            return f"{name} with strides {tuple(rows.stride())}: heads that begin at multiples of 16 bytes are needed"
    return None


def prefill_macros(
    dtype: torch.dtype, dim: int, group: int, num_kv_heads: int, block_size: int, causal: bool, lse: bool, *, clocks: bool = False,
    patience: int = 0, beside: bool = True,
) -> dict[str, int]:  # fmt: skip
    """The macros of ``prefill.cu``.

    ``clocks``: count cycles; ``patience``: tries after which a wait is given up, 0: never; ``beside``: hold a step's exponentials in front of the
    wait for its products (without it, where the compiler puts them: for measurements).
    """
    half = dtype == torch.float16
    macros = {
        "DIM": dim, "GROUP": group, "NUM_KV_HEADS": num_kv_heads, "BLOCK_SIZE": block_size, "HALF": half, "Q_HALF": half, "KV_BYTES": 2,
        "E5M2": 0, "CLUSTER": 1, "STAGES": _RING_BYTES // (KEYS * dim * 2), "CAUSAL": causal, "LSE": lse, "CLOCKS": clocks,
        "PATIENCE": patience, "BESIDE": beside, "WGMMA": 1,
    }  # fmt: skip
    return {name: int(value) for name, value in macros.items()}


def shared_bytes(macros: dict[str, int]) -> int:
    """Dynamic shared memory of a CTA: the stages and two tiles of queries."""
    return (macros["STAGES"] * KEYS + 2 * ROWS) * macros["DIM"] * 2


def prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, out: Tensor,
    lse: Tensor | None, scale: float, causal: bool, tickets: Tensor, *, clocks: Tensor | None = None, patience: int = 0,
    beside: bool = True,
) -> None:  # fmt: skip
    """Launch on checked arguments of shapes that `refuse` and `refuse_layout` let pass.

    Args:
        tickets: ``[2]``, int32, zeros; the kernel leaves zeros behind. Not shared by launches that may run at the same time.
        clocks: ``[multiprocessors, 2]``, int64, or None; gets each CTA's cycles and steps.
        patience, beside: as in `prefill_macros`.
    """
    index, num_kv_heads, block_size = q.device.index or 0, k_cache.shape[2], k_cache.shape[1]
    kernel = _specialised(
        index, q.dtype, q.shape[2], q.shape[1] // num_kv_heads, num_kv_heads, block_size, causal, lse is not None, clocks is not None, patience,
        beside)  # fmt: skip
    maps = queries_map(q.data_ptr(), q.dtype, tuple(q.shape), q.stride(0), q.stride(1), q.shape[1] // num_kv_heads)
    for cache in (k_cache, v_cache):
        maps += pool_map(cache.data_ptr(), cache.dtype, tuple(cache.shape), cache.stride(1))
    arguments = _PARAMS.pack(
        *(0 if t is None else t.data_ptr() for t in (out, lse, block_table, seq_lens, query_start_loc, tickets, clocks)),
        out.stride(0), out.stride(1), *((0, 0) if lse is None else lse.stride()), block_table.stride(0),
        scale, block_table.shape[0], q.shape[0], k_cache.shape[0],
    )  # fmt: skip
    kernel.launch(specialise.num_sms(index), THREADS, maps + arguments, early=False)


@functools.cache
def _specialised(
    index: int, dtype: torch.dtype, dim: int, group: int, num_kv_heads: int, block_size: int, causal: bool, lse: bool, clocks: bool,
    patience: int, beside: bool,
) -> jit.Kernel:  # fmt: skip
    macros = prefill_macros(dtype, dim, group, num_kv_heads, block_size, causal, lse, clocks=clocks, patience=patience, beside=beside)
    return jit.kernel("prefill.cu", "paged_prefill", macros, torch.device("cuda", index), shared_bytes=shared_bytes(macros))


def queries_box(shape: tuple[int, int, int], token_stride: int, head_stride: int, group: int) -> tuple[list[int], list[int], list[int]]:
    """Sizes, strides (all but the first, in numbers) and box of queries: 64 columns of the heads of a group of a tile's tokens."""
    tokens, heads, dim = shape
    return [dim, heads, tokens], [head_stride, token_stride], [64, group, ROWS // group]


def pool_box(shape: tuple[int, int, int, int], slot_stride: int) -> tuple[list[int], list[int], list[int]]:
    """Sizes, strides (all but the first, in numbers) and box of a cache: one head of one block.

    Seen as (64 columns; 8 slots; squares of 64 columns, heads behind each other; 8 slots each, blocks behind each other), a block comes as
    groups of 8 tokens, each group one square of 8 x 64 after the other.
    """
    blocks, block_size, heads, dim = shape
    return [64, 8, heads * dim // 64, blocks * block_size // 8], [slot_stride, 64, 8 * slot_stride], [64, 8, dim // 64, block_size // 8]


@functools.lru_cache(maxsize=1024)
def queries_map(address: int, dtype: torch.dtype, shape: tuple[int, int, int], token_stride: int, head_stride: int, group: int) -> bytes:
    """The tensor map of queries."""
    return _map(address, dtype, *queries_box(shape, token_stride, head_stride, group))


@functools.lru_cache(maxsize=4096)
def pool_map(address: int, dtype: torch.dtype, shape: tuple[int, int, int, int], slot_stride: int) -> bytes:
    """The tensor map of one cache of one layer."""
    return _map(address, dtype, *pool_box(shape, slot_stride))


def _map(address: int, dtype: torch.dtype, sizes: list[int], strides: list[int], box: list[int]) -> bytes:
    """128 bytes for the copy engine: swizzled as wgmma reads it, zeros outside."""
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16 if dtype == torch.float16 else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    long, short = driver.cuuint64_t, driver.cuuint32_t
    result: Any = driver.cuTensorMapEncodeTiled(
        kind, len(sizes), address, [long(n) for n in sizes], [long(n * 2) for n in strides], [short(n) for n in box], [short(1)] * len(box),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)  # fmt: skip
    error, encoded = result
    if int(error):
        raise RuntimeError(f"cuTensorMapEncodeTiled failed: {error} for sizes {sizes}, strides {strides}, box {box}")
    return ctypes.string_at(int(encoded.getPtr()), 128)
