"""Tensor maps: what the copy engine (TMA) needs to know of a tensor, and of the boxes that a copy takes."""

import ctypes
from typing import Any

import torch

from torchpaged.custom_ops.cuda.loaded_kernel import Map


def tensor_map(
    address: int, dtype: torch.dtype, sizes: list[int], strides: list[int], box: list[int], *, swizzle: int
) -> ctypes.Array[Any]:
    """The map of a tensor; outside of it a copy brings zeros.

    ``sizes`` and ``box``: in numbers, innermost dimension first; ``strides``: of all dimensions but that one;
    ``swizzle``: lines of 128, 64 or 32 bytes are swizzled as wgmma reads them; 0: lie as they come.
    """
    from cuda.bindings import driver

    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    kind = {
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }.get(dtype, kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8)
    swizzled = {
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
    }[swizzle]
    long, short = driver.cuuint64_t, driver.cuuint32_t
    result: Any = driver.cuTensorMapEncodeTiled(
        kind,
        len(sizes),
        address,
        [long(n) for n in sizes],
        [long(n * dtype.itemsize) for n in strides],
        [short(n) for n in box],
        [short(1)] * len(box),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzled,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    error, encoded = result
    if int(error):
        raise RuntimeError(
            f"cuTensorMapEncodeTiled failed: {error} for {sizes}, strides {strides}, box {box}"
        )
    return Map.from_buffer_copy(ctypes.string_at(int(encoded.getPtr()), 128))
