"""linear of the ``cuda`` backend: up to 64 tokens by the CUDA C++ kernel, everything else composed of norm,
matmul and activation.

``weight`` and ``norm_weight`` are constants of a step, read before the kernels ahead have
ended (stream_order.py).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.loaded_kernel import Map
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.custom_ops.layers.check import check_linear
from torchpaged.custom_ops.layers.cuda import blaslt
from torchpaged.custom_ops.layers.cuda.linear_shape import (
    MAX_TOKENS,
    NORM_THREADS,
    LinearShape,
    linear_config,
    linear_shape,
    norm_config,
    norm_is_fused,
    token_bucket,
)
from torchpaged.custom_ops.layers.triton.linear import compose, torch_product


class LinearParams(ctypes.Structure):
    """``struct Params`` of linear_params.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "residual", "norm_weight", "out")),
        *((name, ctypes.c_int64) for name in ("x_token", "residual_token", "out_token")),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
        *((name, ctypes.c_int) for name in ("tokens", "unused")),
    ]


class WideParams(ctypes.Structure):
    """Parameters of the wide kernel: two tensor maps and the others."""

    _fields_ = [("weight_map", Map), ("x_map", Map), ("params", LinearParams)]


class NormParams(ctypes.Structure):
    """``struct Params`` of norm.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("x_token", "out_token")),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
    ]


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    activation: str = "none",
) -> None:
    """Launch; arguments as in ``custom_ops/layers/schema.py``. Every choice here depends on shapes, dtypes
    and addresses, never on data."""
    if x.device.type != "cuda":
        raise BackendUnavailableError(
            f"backend 'cuda': its kernels run on an NVIDIA GPU, got tensors on {x.device.type}"
        )
    check_linear(
        x,
        weight,
        out,
        bias=bias,
        residual=residual,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        norm_offset=norm_offset,
        activation=activation,
    )
    if unsupported(x, weight, norm_weight) is not None:
        compose(x, weight, out, bias, residual, norm_weight, norm_eps, norm_offset, activation, _large)
        return
    index, bucket, early = (
        x.device.index or 0,
        token_bucket(x.shape[0]),
        gpu.launches_early(x.device.index or 0),
    )
    shape = linear_shape(
        bucket,
        *weight.shape,
        gpu.num_sms(index),
        gpu.capability(index) == (9, 0),
        early,
        gpu.shared_per_sm(index),
        gpu.shared_per_cta(index),
    )
    if norm_weight is not None and not norm_is_fused(shape, x.dtype, norm_weight.dtype):
        x, norm_weight = _normed(x, norm_weight, norm_eps, norm_offset), None
    aligned = out.shape[1] % 4 == 0 and all(
        t is None or ((t.stride(0) % 4 == 0 or t.dim() == 1) and t.data_ptr() % 8 == 0)
        for t in (out, residual, bias)
    )
    kernel = _specialised(
        index,
        x.dtype,
        bucket,
        *weight.shape,
        weight.stride(0),
        activation,
        norm_weight is not None,
        bias is not None,
        residual is not None,
        aligned,
        shape,
    )
    params: ctypes.Structure = LinearParams(
        *(0 if t is None else t.data_ptr() for t in (x, weight, bias, residual, norm_weight, out)),
        x_token=x.stride(0),
        residual_token=0 if residual is None else residual.stride(0),
        out_token=out.stride(0),
        eps=norm_eps,
        offset=norm_offset,
        tokens=x.shape[0],
    )
    if shape.wide:
        half = x.dtype == torch.float16
        of_weight = _map(
            weight.data_ptr(), *weight.shape, weight.stride(0), shape.rows, half, pairs=activation != "none"
        )
        params = WideParams(
            of_weight, _map(x.data_ptr(), *x.shape, x.stride(0), max(bucket, 8), half), params
        )
    kernel.launch(shape.grid(weight.shape[0]), shape.threads, params, early=early)


def _large(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """A product of many tokens."""
    taken = bias is None and blaslt.takes(x, weight, out, residual)
    if not (taken and blaslt.product(x, weight, out, residual)):
        torch_product(x, weight, out, bias, residual)


def unsupported(x: Tensor, weight: Tensor, norm_weight: Tensor | None) -> str | None:
    """Why the kernel can't take this call, or None. Checked arguments; shapes, dtypes, strides and
    addresses only."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {x.dtype}"
    if not 1 <= x.shape[0] <= MAX_TOKENS:
        return f"{x.shape[0]} tokens"
    if weight.shape[1] % 8 or not weight.numel():
        return f"weight of {tuple(weight.shape)}"
    if any(t.data_ptr() % 16 or t.stride(0) % 8 for t in (x, weight)) or (
        norm_weight is not None and norm_weight.data_ptr() % 16
    ):
        return "rows that do not begin at multiples of 16 bytes"
    return None


@functools.cache
def _specialised(
    index: int,
    dtype: torch.dtype,
    bucket: int,
    out_features: int,
    in_features: int,
    row_stride: int,
    activation: str,
    norm: bool,
    bias: bool,
    residual: bool,
    aligned: bool,
    shape: LinearShape,
) -> jit.Kernel:
    """The kernel of these shapes and features."""
    config = linear_config(
        dtype,
        bucket,
        out_features,
        in_features,
        row_stride,
        activation,
        norm,
        bias,
        residual,
        aligned,
        gpu.launches_early(index),
        shape,
    )
    name = "linear_wide" if shape.wide else "linear"
    return jit.kernel(
        f"{name}.cu", name, config, torch.device("cuda", index), shared_bytes=shape.shared_bytes(bucket, norm)
    )


@functools.lru_cache(maxsize=8192)
def _map(
    address: int, rows: int, columns: int, row_stride: int, box_rows: int, half: bool, pairs: bool = False
) -> ctypes.Array[Any]:
    """What the bulk copy engine knows of a matrix: boxes of ``box_rows`` rows and 64 columns, swizzled as
    wgmma reads them, zeros outside.

    ``pairs``: in a box each row of the upper half of the matrix is followed by its counterpart of the
    lower half.
    """
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16 if half else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    long, short = driver.cuuint64_t, driver.cuuint32_t
    sizes, strides, box = [columns, rows], [row_stride], [64, box_rows]
    if pairs:
        # the middle stride exceeds the last: the engine takes strides in any order
        sizes, strides, box = (
            [columns, 2, rows // 2],
            [rows // 2 * row_stride, row_stride],
            [64, 2, box_rows // 2],
        )
    error, encoded = driver.cuTensorMapEncodeTiled(
        kind,
        len(sizes),
        address,
        [long(n) for n in sizes],
        [long(n * 2) for n in strides],
        [short(n) for n in box],
        [short(1)] * len(box),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error):
        raise RuntimeError(
            f"cuTensorMapEncodeTiled failed: {error} for [{rows}, {columns}] with rows {row_stride} apart"
        )
    return Map.from_buffer_copy(ctypes.string_at(int(encoded.getPtr()), 128))


def _normed(x: Tensor, norm_weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMSNorm of ``x [T, K]`` by a launch of its own."""
    index, out = x.device.index or 0, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    early = gpu.launches_early(index)
    config = norm_config(x.dtype, norm_weight.dtype, x.shape[1], early)
    kernel = jit.kernel("norm.cu", "rms_norm", config, x.device, shared_bytes=0)
    params = NormParams(
        x.data_ptr(), norm_weight.data_ptr(), out.data_ptr(), x.stride(0), out.stride(0), eps, offset
    )
    kernel.launch(x.shape[0], NORM_THREADS, params, early=early)
    return out
