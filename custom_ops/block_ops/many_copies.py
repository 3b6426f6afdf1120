"""Many copies between a GPU and pinned memory by one call of the driver. torch makes a call of each, for
which the host takes 12 to 22 us: as long as a link of 55 GB/s for a MiB. No op: its caller runs on the host,
between steps (`torchpaged.cache.host_blocks`)."""

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import Any

import torch

#: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in the order of the stream.
_IN_STREAM_ORDER = 1


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (("source_order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


@functools.cache
def _call() -> Any:
    """``cuMemcpyBatchAsync`` as drivers of CUDA 13 have it; None: there is none such."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
    except (OSError, AttributeError):
        return None


def can_copy_many() -> bool:
    """Whether `copy_many` can be called: on NVIDIA, with a driver of CUDA 13."""
    return _call() is not None


def copy_many(to: Sequence[int], source: Sequence[int], sizes: Sequence[int], stream: int) -> None:
    """Start copies, in any order among each other, on ``stream``, none of which is the default one.

    torch's allocators do not know of them: the caller keeps the memory alive.

    Args:
        to, source: addresses.
        sizes: bytes.
        stream: a stream's handle.
    """
    columns = [array("Q", column) for column in (to, source, sizes)]
    pointers = [ctypes.c_void_p(column.buffer_info()[0]) for column in columns]
    count, one, first = ctypes.c_size_t(len(sizes)), ctypes.c_size_t(1), ctypes.c_size_t(0)
    how = ctypes.byref(_Attributes(_IN_STREAM_ORDER))
    error = _call()(*pointers, count, how, ctypes.byref(first), one, ctypes.c_void_p(stream))
    if error:
        raise RuntimeError(f"cuMemcpyBatchAsync failed: {error}")
