"""linear of the ``cuda`` backend: up to 64 tokens, and some products of up to 256, by CUDA C++ kernels,
everything else composed of norm, matmul and activation.

``weight`` and ``norm_weight`` are constants of a step, read before the kernels ahead have
ended (docs/stream_order.md).
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import ahead
from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.loaded_kernel import address
from torchpaged.custom_ops.cuda.params import struct_of
from torchpaged.custom_ops.cuda.routes import require_gpu
from torchpaged.custom_ops.cuda.tensor_map import tensor_map
from torchpaged.custom_ops.layers.call import LinearCall
from torchpaged.custom_ops.layers.check import check_linear
from torchpaged.custom_ops.layers.cuda import blaslt, linear_large
from torchpaged.custom_ops.layers.cuda.linear_large import LargeShape
from torchpaged.custom_ops.layers.cuda.linear_shape import (
    MAX_TOKENS,
    NORM_THREADS,
    LinearShape,
    LinearSpec,
    linear_config,
    linear_shape,
    norm_config,
    norm_is_fused,
    token_bucket,
)
from torchpaged.custom_ops.layers.triton.linear import compose, torch_product


def linear(call: LinearCall) -> None:
    """Launch; arguments as in ``custom_ops/layers/schema.py``. Every choice here depends on shapes, dtypes
    and addresses, never on data."""
    require_gpu(call.x.device)
    check_linear(call)
    if unsupported(call) is not None:
        large = _large_shape(call)
        if large is None:
            compose(call, _cublas)
        else:
            _launch_large(call if call.norm_weight is None else _without_norm(call), large)
        return
    index, weight, norm = call.x.device.index or 0, call.weight, call.norm_weight
    shape = _shape(index, token_bucket(call.x.shape[0]), *weight.shape)
    if norm is not None and not norm_is_fused(shape, call.x.dtype, norm.dtype):
        call = _without_norm(call)
    kernel, early = _specialised(index, LinearSpec.of(call), shape), gpu.launches_early(index)
    kernel.launch(shape.grid(weight.shape[0]), shape.threads, _params(call, shape), early=early)


def _plain_params(call: LinearCall) -> ctypes.Structure:
    x, weight, out, bias, scale, residual, norm_weight = call[:7]
    return struct_of("linear.cu")(
        *map(address, (x, weight, bias, scale, residual, norm_weight, out)),
        x_token=x.stride(0),
        residual_token=0 if residual is None else residual.stride(0),
        out_token=out.stride(0),
        eps=call.norm_eps,
        offset=call.norm_offset,
        tokens=x.shape[0],
    )


def _params(call: LinearCall, shape: LinearShape) -> ctypes.Structure:
    params = _plain_params(call)
    if not shape.wide:
        return params
    maps = _maps(call, shape.rows, max(token_bucket(call.x.shape[0]), 8))
    return struct_of("linear_wide.cu", "BulkParams")(*maps, params)


def _maps(call: LinearCall, rows: int, tokens: int) -> tuple[ctypes.Array[Any], ctypes.Array[Any]]:
    """The tensor maps of the weight, in boxes of ``rows`` rows, and of x, in boxes of ``tokens``."""
    weight, x = call.weight, call.x
    at, stride, pairs = weight.data_ptr(), weight.stride(0), call.activation != "none"
    of_weight = _map(at, *weight.shape, stride, rows, weight.dtype, pairs=pairs)
    return of_weight, _map(x.data_ptr(), *x.shape, x.stride(0), tokens, x.dtype)


@functools.cache
def _shape(index: int, bucket: int, out_features: int, in_features: int) -> LinearShape:
    return linear_shape(
        bucket,
        out_features,
        in_features,
        gpu.num_sms(index),
        gpu.capability(index) == (9, 0),
        gpu.launches_early(index),
        gpu.shared_per_sm(index),
        gpu.shared_per_cta(index),
    )


def _cublas(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """A product of many tokens; none while kernels are gathered, when it would mean nothing."""
    if ahead.here() is not None:
        return
    taken = bias is None and blaslt.takes(x, weight, out, residual)
    if not (taken and blaslt.product(x, weight, out, residual)):
        torch_product(x, weight, out, bias, residual)


def _large_shape(call: LinearCall) -> LargeShape | None:
    """How ``linear_large.cu`` is cut for this call; None: it does not take it."""
    tokens, index = call.x.shape[0], call.x.device.index or 0
    if not MAX_TOKENS < tokens <= linear_large.MAX_TOKENS or unfit(call) is not None:
        return None
    out_features, in_features = call.weight.shape
    if gpu.capability(index) != (9, 0) or min(call.x.stride(0), call.weight.stride(0)) < in_features:
        return None  # also rows that overlap, which cuBLASLt is not given either
    return linear_large.large_shape(tokens, out_features, in_features, gpu.num_sms(index))


def _launch_large(call: LinearCall, shape: LargeShape) -> None:
    """Launch on a call without norm."""
    index, width = call.x.device.index or 0, call.weight.shape[0]
    early, params = gpu.launches_early(index), _plain_params(call)
    kernel, of_sum = _large_kernels(index, LinearSpec.of(call), shape)
    parts = call.x.new_empty(shape.parts(width), dtype=torch.float32)
    maps = _maps(call, shape.rows, shape.tokens)
    packed = struct_of("linear_large.cu", "LargeParams")(*maps, params, parts.data_ptr())
    kernel.launch(shape.grid(width), shape.threads, packed, early=early)
    if of_sum is not None:
        packed = struct_of("linear_sum.cu", "SumParams")(params, parts.data_ptr())
        of_sum.launch(shape.sum_grid(width), linear_large.SUM_THREADS, packed, early=early)


@functools.cache
def _large_kernels(index: int, spec: LinearSpec, shape: LargeShape) -> tuple[jit.Kernel, jit.Kernel | None]:
    """The kernel of these shapes and features, and the one that adds its parts, if there are any."""
    device, early, shared = torch.device("cuda", index), gpu.launches_early(index), shape.shared_bytes
    config, of_sum = linear_large.large_config(spec, shape, early=early), None
    if shape.k_parts > 1:
        of_sum = linear_large.sum_config(spec, shape, early=early)
        jit.compile_ahead("linear_sum.cu", of_sum, gpu.capability(index))
    kernel = jit.kernel("linear_large.cu", "linear_large", config, device, shared_bytes=shared)
    if of_sum is None:
        return kernel, None
    return kernel, jit.kernel("linear_sum.cu", "linear_sum", of_sum, device, shared_bytes=0)


def unsupported(call: LinearCall) -> str | None:
    """Why the kernels of up to 64 tokens can't take this call, or None. Checked arguments; shapes, dtypes,
    strides and addresses only."""
    if not 1 <= call.x.shape[0] <= MAX_TOKENS:
        return f"{call.x.shape[0]} tokens"
    return unfit(call)


def unfit(call: LinearCall) -> str | None:
    """Why no kernel can, whatever the number of tokens, or None."""
    x, weight, norm_weight = call.x, call.weight, call.norm_weight
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {x.dtype}"
    if weight.shape[1] % 8 or not weight.numel():
        return f"weight of {tuple(weight.shape)}"
    if any(t.data_ptr() % 16 or t.stride(0) % 8 for t in (x, weight)) or (
        norm_weight is not None and norm_weight.data_ptr() % 16
    ):
        return "rows that do not begin at multiples of 16 bytes"
    return None


@functools.cache
def _specialised(index: int, spec: LinearSpec, shape: LinearShape) -> jit.Kernel:
    """The kernel of these shapes and features."""
    config = linear_config(spec, shape, early=gpu.launches_early(index))
    name, shared = "linear_wide" if shape.wide else "linear", shape.shared_bytes(spec.bucket, spec.norm)
    return jit.kernel(f"{name}.cu", name, config, torch.device("cuda", index), shared_bytes=shared)


@functools.lru_cache(maxsize=8192)
def _map(
    address: int,
    rows: int,
    columns: int,
    row_stride: int,
    box_rows: int,
    dtype: torch.dtype,
    pairs: bool = False,
) -> ctypes.Array[Any]:
    """The tensor map of a matrix: boxes of ``box_rows`` rows and 64 columns.

    ``pairs``: in a box each row of the upper half of the matrix is followed by its counterpart of the
    lower half.
    """
    sizes, strides, box = [columns, rows], [row_stride], [64, box_rows]
    if pairs:
        # the middle stride exceeds the last: the engine takes strides in any order
        half = rows // 2
        sizes, strides, box = [columns, 2, half], [half * row_stride, row_stride], [64, 2, box_rows // 2]
    return tensor_map(address, dtype, sizes, strides, box, swizzle=128)


def _without_norm(call: LinearCall) -> LinearCall:
    """The call on RMSNorm of ``x [T, K]``, by a launch of its own."""
    x, weight = call.x, call.norm_weight
    assert weight is not None
    index, out = x.device.index or 0, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    early = gpu.launches_early(index)
    config = norm_config(x.dtype, weight.dtype, x.shape[1], early)
    kernel = jit.kernel("norm.cu", "rms_norm", config, x.device, shared_bytes=0)
    addresses = map(address, (x, weight, out))
    params = struct_of("norm.cu")(*addresses, x.stride(0), out.stride(0), call.norm_eps, call.norm_offset)
    kernel.launch(x.shape[0], NORM_THREADS, params, early=early)
    return call._replace(x=out, norm_weight=None)
