"""linear of the ``cuda`` backend: up to 64 tokens by the CUDA C++ kernel, everything else composed of norm, matmul and activation.

The kernel starts reading ``weight`` and ``norm_weight`` before earlier kernels on the stream have finished (programmatic dependent
launch). So these two are constants: what writes them must be done before the kernel in front of this one starts.
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from torchpaged.custom_ops import validation_layers
from torchpaged.custom_ops.cuda import jit, specialise
from torchpaged.custom_ops.cuda.linear_shape import (
    MAX_TOKENS,
    NORM_THREADS,
    LinearShape,
    linear_macros,
    linear_shape,
    norm_is_fused,
    norm_macros,
    token_tiles,
)
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.custom_ops.triton.linear import compose

_PARAMS = struct.Struct("6Q3q2f2i")  # struct Params of linear.cu
_NORM_PARAMS = struct.Struct("3Q2q2f")  # and of norm.cu


def linear(
    x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None,
    norm_weight: Tensor | None = None, norm_eps: float = 1e-6, norm_offset: float = 0.0, activation: str = "none",
) -> None:  # fmt: skip
    """Launch; arguments as in ``custom_ops/ops.py``. Every choice here depends on shapes, dtypes and addresses, never on data."""
    if x.device.type != "cuda":
        raise BackendUnavailableError(f"backend 'cuda': its kernels run on an NVIDIA GPU, got tensors on {x.device.type}")
    validation_layers.check_linear(
        x, weight, out, bias=bias, residual=residual, norm_weight=norm_weight, norm_eps=norm_eps, norm_offset=norm_offset,
        activation=activation)  # fmt: skip
    if unsupported(x, weight, norm_weight) is not None:
        compose(x, weight, out, bias, residual, norm_weight, norm_eps, norm_offset, activation)
        return
    tokens, index = x.shape[0], x.device.index or 0
    tiles = token_tiles(tokens)
    if norm_weight is not None and not norm_is_fused(tiles, x.dtype, norm_weight.dtype):
        x, norm_weight = _normed(x, norm_weight, norm_eps, norm_offset), None
    aligned = out.shape[1] % 4 == 0 and all(
        t is None or ((t.stride(0) % 4 == 0 or t.dim() == 1) and t.data_ptr() % 8 == 0) for t in (out, residual, bias)
    )
    kernel, shape = _specialised(
        index, x.dtype, tiles, weight.shape[0], weight.shape[1], weight.stride(0), activation, norm_weight is not None, bias is not None,
        residual is not None, aligned)  # fmt: skip
    arguments = _PARAMS.pack(
        *(0 if t is None else t.data_ptr() for t in (x, weight, bias, residual, norm_weight, out)), x.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0), norm_eps, norm_offset, tokens, 0,
    )  # fmt: skip
    kernel.launch(shape.grid(weight.shape[0]), shape.threads, arguments, early=specialise.launches_early(index))


def unsupported(x: Tensor, weight: Tensor, norm_weight: Tensor | None) -> str | None:
    """Why the kernel can't take this call, or None. Checked arguments; shapes, dtypes, strides and addresses only."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {x.dtype}"
    if not 1 <= x.shape[0] <= MAX_TOKENS:
        return f"{x.shape[0]} tokens"
    if weight.shape[1] % 8 or not weight.numel():
        return f"weight of {tuple(weight.shape)}"
    if any(t.data_ptr() % 16 or t.stride(0) % 8 for t in (x, weight)) or (norm_weight is not None and norm_weight.data_ptr() % 16):
        return "rows that do not begin at multiples of 16 bytes"
    return None


@functools.cache
def _specialised(
    index: int, dtype: torch.dtype, tiles: int, out_features: int, in_features: int, row_stride: int, activation: str, norm: bool,
    bias: bool, residual: bool, aligned: bool,
) -> tuple[jit.Kernel, LinearShape]:  # fmt: skip
    """The kernel of these shapes and features, and its launch shape."""
    early = specialise.launches_early(index)
    hopper = specialise.capability(index) == (9, 0)
    shape = linear_shape(tiles, out_features, in_features, specialise.num_sms(index), hopper, early)
    macros = linear_macros(dtype, tiles, out_features, in_features, row_stride, activation, norm, bias, residual, aligned, early, shape)
    kernel = jit.kernel("linear.cu", "linear", macros, torch.device("cuda", index), shared_bytes=shape.shared_bytes(tiles, norm))
    return kernel, shape


def _normed(x: Tensor, norm_weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMSNorm of ``x [T, K]`` by a launch of its own."""
    index, out = x.device.index or 0, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    early = specialise.launches_early(index)
    macros = norm_macros(x.dtype, norm_weight.dtype, x.shape[1], early)
    kernel = jit.kernel("norm.cu", "rms_norm", macros, x.device, shared_bytes=0)
    arguments = _NORM_PARAMS.pack(x.data_ptr(), norm_weight.data_ptr(), out.data_ptr(), x.stride(0), out.stride(0), eps, offset)
    kernel.launch(x.shape[0], NORM_THREADS, arguments, early=early)
    return out
