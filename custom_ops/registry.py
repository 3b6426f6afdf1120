"""The ops of the ``torchpaged`` namespace: defined, implemented and handed out here. Which there are:
families.py.

Each op has one *overload* per backend, all with the same schema and the same meaning::

    # the device's own kernel: CPU -> native C++, NVIDIA GPU -> .cuda, other GPU -> .triton
    torch.ops.torchpaged.paged_attention
    torch.ops.torchpaged.paged_attention.reference  # plain torch, any device: the specification
    torch.ops.torchpaged.paged_attention.cpu        # native C++ kernel
    torch.ops.torchpaged.paged_attention.triton     # Triton kernel
    # CUDA C++ kernel for decode (NVRTC), Triton kernels for the rest
    torch.ops.torchpaged.paged_attention.cuda

So a backend is chosen by holding another handle (``BACKEND_OPS["triton"].paged_attention``), never inside a
traced call.

Rules every kernel keeps (``B`` requests, ``T`` tokens):

* ops return ``()`` and write into arguments declared ``Tensor(a!)``; no output aliases an input;
* slot -1 skips the write; block 0 is the null block; table entries past ``ceil(seq_len / block_size)`` are
  never read;
* query ``i`` of a request sits at position ``seq_len - query_len + i``; positions below 0 (left padding) see
  nothing, so seq_len may be below query_len, and even negative;
* a query row that sees no key, and every token row at or after ``query_start_loc[-1]``, gives zeros and
  LSE -inf;
* a query row that sees a score of NaN or +inf, or nothing but -inf, gives NaN; a NaN value gives NaN in its
  column (docs/ops.md);
* numbers beyond an fp8 cache's range are stored as its largest, NaN as NaN;
* no two tokens have one slot (-1 and block 0 excepted), no block is twice in a row of the table (block
  0 excepted);
* LSE is the natural logarithm of the softmax denominator (the sink's term included), float32,
  ``[T, num_heads]``.

The reasons for void ops, for ``Library.define`` rather than ``custom_op`` and for explicit
tensors: docs/ops.md.
"""

import contextlib
import importlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from torchpaged.custom_ops import launches, native
from torchpaged.custom_ops.callers_modes import apart_from_modes
from torchpaged.custom_ops.early_launch import READS_EARLY, refuse_inductors_for
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.families import FAMILIES, Family
from torchpaged.custom_ops.words import one_line

# kept for the life of the process: dropping it deregisters the ops
LIBRARY = torch.library.Library("torchpaged", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

#: Overload names, i.e. the backends that have kernels of their own. "" is the device's default kernel.
OVERLOADS = ("", "reference", "cpu", "triton", "cuda")

SCHEMAS = {op: schema for family in FAMILIES for op, schema in family.schemas.items()}
_FAMILY = {op: family for family in FAMILIES for op in family.schemas}
#: Ops with a native C++ kernel.
NATIVE_OPS = frozenset(op for family in FAMILIES for op in family.native)


class BackendOps(NamedTuple):
    """The op handles of one backend; hold these, call these (a handle is bound once and traces as itself)."""

    write_kv: Any
    paged_attention: Any
    merge_attn_states: Any
    copy_blocks: Any
    advance_step: Any
    rope_write_kv: Any
    sample_tokens: Any
    accept_tokens: Any
    finish_step: Any
    embedding: Any
    rms_norm: Any
    act_and_mul: Any
    gate_heads: Any
    linear: Any
    mla_attention: Any
    write_latent: Any
    rope_write_latent: Any
    up_project_values: Any
    cascade_attention: Any
    causal_conv: Any
    linear_attention: Any
    delta_gates: Any
    gated_rms_norm: Any
    delta_step: Any
    mamba2_step: Any
    selective_scan: Any
    rg_lru: Any
    write_index_keys: Any
    index_logits: Any
    top_k_indices: Any
    route_experts: Any
    apply_experts: Any

    def __repr__(self) -> str:
        return one_line(self, *(f"{name}={op}" for name, op in self._asdict().items()))


# -------------------------------------------------------------------------------------------- implementations
def _recorded(op: str, function: Callable[..., None]) -> Callable[..., None]:
    """``function`` as the dispatcher calls it, with flat arguments."""
    record = _FAMILY[op].records.get(op)
    return function if record is None else lambda *args, **kwargs: function(record(*args, **kwargs))


def _lazy(op: str, file: str, of_torch: bool = False) -> Any:
    """The function ``op`` of a file of its family. The file is imported at the first launch, so that
    importing torchpaged stays light; ``of_torch``: it consists of torch's ops."""
    module = f"torchpaged.custom_ops.{_FAMILY[op].folder}.{file}"
    cached: Any = None

    def launch(*args: Any, **kwargs: Any) -> None:
        nonlocal cached
        if cached is None:
            cached = _recorded(op, getattr(importlib.import_module(module), op))
            cached = apart_from_modes(cached) if of_torch else cached
        device = args[0].device
        foreign = device.type == "cuda" and device.index != torch.cuda.current_device()
        if foreign or launches.around is not None:
            with contextlib.ExitStack() as stack:
                if foreign:
                    # Python kernels get no device guard from the dispatcher
                    stack.enter_context(torch.cuda.device(device))
                if launches.around is not None:
                    stack.enter_context(launches.around(op, args))
                cached(*args, **kwargs)
            return
        cached(*args, **kwargs)

    launch.__name__ = op
    return launch


def _of_this_gpu(op: str) -> Any:
    """The default kernel on a GPU: what the backend "auto" runs there, ``cuda`` if its compiler is here and
    ``triton`` if not."""
    kernels = {name: _lazy(op, f"{name}.{op}") for name in ("cuda", "triton")}
    chosen: Any = None

    def launch(*args: Any, **kwargs: Any) -> None:
        nonlocal chosen
        if chosen is None:
            jit = importlib.import_module("torchpaged.custom_ops.cuda.jit")
            chosen = kernels["cuda" if jit.unavailable() is None else "triton"]
        chosen(*args, **kwargs)

    launch.__name__ = op
    return launch


def _nothing(*_: Any, **__: Any) -> None:
    """The fake kernel of an op whose arguments are checked when it runs."""


#: What a trace runs in the place of each op, with flat arguments.
FAKES = {
    op: _recorded(op, family.fakes[op]) if op in family.fakes else _nothing
    for family in FAMILIES
    for op in family.schemas
}


def _without_memory(op: str) -> Any:
    """What runs in traces, and on the meta device: the dispatcher calls it if one tensor is there, and all of
    a call's others would be left unread and unwritten. For ops that read early it asks for Inductor's
    launches, too."""
    fake, names = FAKES[op], re.findall(r"(\w+)(?:=[^,)]+)?[,)]", SCHEMAS[op])
    is_early = op in READS_EARLY

    def run(*args: Any, **kwargs: Any) -> Any:
        if is_early:
            refuse_inductors_for(args[0])
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            # a trace's tensors are of other types
            if type(value) in (Tensor, Parameter) and not value.is_meta:
                expected = "device meta, where another tensor of the call is"
                raise ArgumentError(name, expected, str(value.device), "move one of the two")
        return fake(*args, **kwargs)

    return run


def _register() -> None:
    for op in SCHEMAS:
        _define(op)
    has_native = native.load({op: SCHEMAS[op] for op in NATIVE_OPS})
    for family in FAMILIES:
        for op in family.schemas:
            _implement(op, family, has_native)


def _define(op: str) -> None:
    for overload in OVERLOADS:
        name = f"{op}.{overload}" if overload else op
        LIBRARY.define(name + SCHEMAS[op], tags=_TAGS)
        torch.library.register_fake(f"torchpaged::{name}", _without_memory(op), lib=LIBRARY)


def _implement(op: str, family: Family, has_native: bool) -> None:
    reference, triton = _lazy(op, "reference", of_torch=True), _lazy(op, f"triton.{op}")
    cuda, of_this_gpu = (_lazy(op, f"cuda.{op}"), _of_this_gpu(op)) if op in family.cuda else (triton, triton)
    LIBRARY.impl(f"{op}.reference", reference, "CompositeExplicitAutograd")
    LIBRARY.impl(f"{op}.triton", triton, "CompositeExplicitAutograd")
    LIBRARY.impl(f"{op}.cuda", cuda, "CompositeExplicitAutograd")
    LIBRARY.impl(op, of_this_gpu, "CUDA")
    if not has_native:
        LIBRARY.impl(op, native.raise_absent if native.wrong else reference, "CPU")
        LIBRARY.impl(f"{op}.cpu", native.raise_absent, "CompositeExplicitAutograd")
    elif op not in family.native:  # of these the library itself registers both
        kernel = _lazy(op, "cpu", of_torch=True) if op in family.on_native else reference
        LIBRARY.impl(op, kernel, "CPU")
        LIBRARY.impl(f"{op}.cpu", kernel, "CPU")


_register()


def _handles(overload: str) -> BackendOps:
    return BackendOps(
        *(getattr(getattr(torch.ops.torchpaged, op), overload or "default") for op in BackendOps._fields)
    )


#: Backend name -> its op handles; "default" dispatches by device.
BACKEND_OPS: dict[str, BackendOps] = {overload or "default": _handles(overload) for overload in OVERLOADS}


_NATIVE_HANDLES = frozenset(
    getattr(BACKEND_OPS[name], op) for name in ("default", "cpu") for op in NATIVE_OPS
)
_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


#: Handles whose kernels are launched from Python on every device, or on all but a CPU.
_PYTHON_HANDLES = {
    getattr(BACKEND_OPS[name], op): name != "default"
    for name in ("default", "reference", "triton", "cuda")
    for op in BackendOps._fields
}


def checks_arguments(handle: Any, device: torch.device) -> bool:
    """Whether what ``handle`` runs on ``device`` checks every argument before it writes, with an
    `ArgumentError`: launchers in Python do. Native kernels raise a RuntimeError, the meta device runs a fake,
    and of ops that are defined elsewhere nothing is known."""
    known = _PYTHON_HANDLES.get(handle)
    return known is not None and (device.type == "cuda" or (known and device.type == "cpu"))


def check_native_dtype(handle: Any, **tensors: torch.Tensor) -> None:
    """Refuse, with an `ArgumentError`, dtypes that the native CPU kernel behind ``handle`` doesn't take;
    others pass.

    The kernel refuses them too, but as a RuntimeError: a library of the stable ABI knows no Python class.
    """
    for name, tensor in tensors.items():
        native_here = (
            tensor.device.type == "cpu" and tensor.dtype not in _NATIVE_DTYPES and handle in _NATIVE_HANDLES
        )
        if native_here and native.status()[0]:
            raise ArgumentError(
                name,
                " or ".join(map(str, _NATIVE_DTYPES)) + " for the cpu backend",
                str(tensor.dtype),
                (
                    "the reference backend takes float64 and fp8 pools: ops=BACKEND_OPS['reference'], "
                    "backend='reference'"
                ),
            )


def native_status() -> tuple[bool, str]:
    """Whether the native CPU kernels are loaded, and from where or why not."""
    return native.status()
