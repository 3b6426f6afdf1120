"""Products of more than 64 tokens by cuBLASLt: ``out = x @ weight.T``, or that and a residual which is read
where it lies. torch copies an addend into the output first, a launch of its own (docs/log/large_steps.md).

The library is the one that torch has loaded. Of the algorithms that it proposes for the sizes, in its order,
the first one with the preferred tile is taken: sizes alone decide, nothing is timed.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: From so many tokens on this path is taken; fewer are another kernel's (linear_shape.py).
MIN_TOKENS = 65
_TYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_FLOAT32, _COMPUTE_32F, _TRANSPOSED = 0, 68, 1
_OP_A, _MOST_WORKSPACE, _REDUCTIONS = 3, 1, 3  # attributes of a product, of a preference
_IN_FLOAT32 = 2  # parts of a sum are added up in float32, by no atomics
_WORKSPACE = 32 << 20
_PROPOSALS = 16
_NOT_SUPPORTED = 15  # cublasStatus_t
_TILE, _WAVES = 1, 10.0  # attribute of an algorithm; from so many rounds of tiles on, these are preferred
#: 176 x 128 and 168 x 128. Products that keep the GPU busy for long run at its power limit, and a tile that
#: multiplies slower in itself is then faster (docs/log/step.md).
_LONG_TILES = (201, 197)


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@functools.cache
def _library() -> Any:
    """cuBLASLt as torch has loaded it, or None."""
    version = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{version}")
    except OSError:
        return None


def takes(x: Tensor, weight: Tensor, out: Tensor, residual: Tensor | None) -> bool:
    """Whether `product` takes these tensors; if not, torch's product does. Shapes, dtypes, strides and
    addresses only."""
    tensors = [t for t in (x, weight, out, residual) if t is not None]
    return (
        x.shape[0] >= MIN_TOKENS
        and x.dtype in _TYPES
        and all(t.stride(1) == 1 and t.stride(0) % 8 == 0 for t in tensors)
        and all(t.stride(0) >= t.shape[1] > 0 for t in tensors)  # no lines that overlap
        and all(t.data_ptr() % 256 == 0 for t in tensors)  # as cuBLASLt takes for granted
        and _library() is not None
    )


def product(x: Tensor, weight: Tensor, out: Tensor, residual: Tensor | None) -> bool:
    """``out = x @ weight.T + residual`` on tensors that `takes` lets pass. False: cuBLASLt has no algorithm
    for these sizes, and nothing is written."""
    index, addend = x.device.index or 0, out if residual is None else residual
    lines = x.stride(0), weight.stride(0), out.stride(0), addend.stride(0)
    call = _call(index, _TYPES[x.dtype], *x.shape, weight.shape[0], lines)
    if call is None:
        return False
    workspace = torch.empty(call.workspace, dtype=torch.uint8, device=x.device)
    one, beta = ctypes.c_float(1.0), ctypes.c_float(0.0 if residual is None else 1.0)
    a, b, c, d = call.layouts
    of_weight, of_x, of_addend, of_out = (ctypes.c_void_p(t.data_ptr()) for t in (weight, x, addend, out))
    _check(
        _library().cublasLtMatmul(
            _handle(index),
            call.description,
            ctypes.byref(one),
            of_weight,
            a,
            of_x,
            b,
            ctypes.byref(beta),
            of_addend,
            c,
            of_out,
            d,
            ctypes.byref(call.algorithm),
            ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_size_t(call.workspace),
            ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        ),
        "cublasLtMatmul",
    )
    return True


class _Call(NamedTuple):
    """What cuBLASLt needs to know of a product of some sizes."""

    description: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ...]
    algorithm: Any
    workspace: int


@functools.cache
def _call(
    index: int, kind: int, rows: int, depth: int, width: int, lines: tuple[int, int, int, int]
) -> _Call | None:
    """Of these sizes, kept for the life of the process. None: cuBLASLt has no algorithm for them.
    ``lines``: strides of the rows of x, weight, out and residual."""
    description = ctypes.c_void_p()
    make = _library().cublasLtMatmulDescCreate
    _check(make(ctypes.byref(description), _COMPUTE_32F, _FLOAT32), "cublasLtMatmulDescCreate")
    _set("MatmulDesc", description, _OP_A, ctypes.c_int32(_TRANSPOSED))
    of_x, of_weight, of_out, of_residual = lines
    # columns first: out.T = weight @ x.T
    layouts = (
        _layout(kind, depth, width, of_weight),
        _layout(kind, depth, rows, of_x),
        _layout(kind, width, rows, of_residual),
        _layout(kind, width, rows, of_out),
    )
    proposal = _choose(_handle(index), description, layouts)
    return None if proposal is None else _Call(description, layouts, proposal.algorithm, proposal.workspace)


def _set(of: str, target: Any, attribute: int, value: Any) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    name = f"cublasLt{of}SetAttribute"
    _check(getattr(_library(), name)(target, attribute, ctypes.byref(value), size), name)


def _choose(
    handle: ctypes.c_void_p, description: ctypes.c_void_p, layouts: tuple[ctypes.c_void_p, ...]
) -> _Proposal | None:
    preference, found = ctypes.c_void_p(), ctypes.c_int()
    library, proposals = _library(), (_Proposal * _PROPOSALS)()
    _check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "PreferenceCreate")
    _set("MatmulPreference", preference, _MOST_WORKSPACE, ctypes.c_uint64(_WORKSPACE))
    _set("MatmulPreference", preference, _REDUCTIONS, ctypes.c_uint32(_IN_FLOAT32))
    status = library.cublasLtMatmulAlgoGetHeuristic(
        handle, description, *layouts, preference, _PROPOSALS, proposals, ctypes.byref(found)
    )
    library.cublasLtMatmulPreferenceDestroy(preference)
    if status != _NOT_SUPPORTED:
        _check(status, "cublasLtMatmulAlgoGetHeuristic")
    able = [one for one in proposals[: found.value] if one.state == 0]
    if not able or able[0].waves < _WAVES:
        return able[0] if able else None
    return next((one for one in able if _tile(one) in _LONG_TILES), able[0])


def _tile(proposal: _Proposal) -> int:
    tile, size = ctypes.c_uint32(), ctypes.c_size_t()
    _check(
        _library().cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(proposal.algorithm),
            _TILE,
            ctypes.byref(tile),
            ctypes.c_size_t(4),
            ctypes.byref(size),
        ),
        "cublasLtMatmulAlgoConfigGetAttribute",
    )
    return tile.value


def _layout(kind: int, rows: int, columns: int, line: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    make = _library().cublasLtMatrixLayoutCreate
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(line)
    _check(make(ctypes.byref(layout), kind, *sizes), "cublasLtMatrixLayoutCreate")
    return layout


@functools.cache
def _handle(index: int) -> ctypes.c_void_p:
    """cuBLASLt's handle of the current device, which is number ``index``."""
    handle = ctypes.c_void_p()
    _check(_library().cublasLtCreate(ctypes.byref(handle)), "cublasLtCreate")
    return handle


def _check(status: int, name: str) -> None:
    if status:
        raise RuntimeError(f"{name} failed: status {status}")
