"""The ops of the ``torchpaged`` namespace: defined, implemented and handed out here; a family's folder has
its ``schema.py``.

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

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchpaged.custom_ops import launches, native
from torchpaged.custom_ops.attention.call import AttentionCall, CascadeCall, MergeCall
from torchpaged.custom_ops.attention.fake import FAKES as ATTENTION_FAKES
from torchpaged.custom_ops.attention.schema import SCHEMAS as ATTENTION
from torchpaged.custom_ops.block_ops.schema import SCHEMAS as BLOCK_OPS
from torchpaged.custom_ops.cache_write.call import RotatedWriteCall, WriteCall
from torchpaged.custom_ops.cache_write.fake import FAKES as CACHE_WRITE_FAKES
from torchpaged.custom_ops.cache_write.schema import SCHEMAS as CACHE_WRITE
from torchpaged.custom_ops.callers_modes import apart_from_modes
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.experts.call import ExpertsCall, RouteCall
from torchpaged.custom_ops.experts.fake import FAKES as EXPERTS_FAKES
from torchpaged.custom_ops.experts.schema import SCHEMAS as EXPERTS
from torchpaged.custom_ops.indexer.call import IndexCall
from torchpaged.custom_ops.indexer.fake import FAKES as INDEXER_FAKES
from torchpaged.custom_ops.indexer.schema import SCHEMAS as INDEXER
from torchpaged.custom_ops.layers.call import LinearCall, NormCall
from torchpaged.custom_ops.layers.fake import FAKES as LAYERS_FAKES
from torchpaged.custom_ops.layers.schema import SCHEMAS as LAYERS
from torchpaged.custom_ops.mla.call import LatentCall, LatentWriteCall
from torchpaged.custom_ops.mla.fake import FAKES as MLA_FAKES
from torchpaged.custom_ops.mla.schema import SCHEMAS as MLA
from torchpaged.custom_ops.state.call import (
    ConvCall,
    DeltaStepCall,
    GatedNormCall,
    GatesCall,
    LinearAttentionCall,
)
from torchpaged.custom_ops.state.fake import FAKES as STATE_FAKES
from torchpaged.custom_ops.state.schema import SCHEMAS as STATE
from torchpaged.custom_ops.step_end.call import AcceptCall, AdvanceCall, FinishCall, SampleCall
from torchpaged.custom_ops.step_end.fake import FAKES as STEP_END_FAKES
from torchpaged.custom_ops.step_end.schema import SCHEMAS as STEP_END
from torchpaged.custom_ops.words import one_line

# kept for the life of the process: dropping it deregisters the ops
LIBRARY = torch.library.Library("torchpaged", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

#: Overload names, i.e. the backends that have kernels of their own. "" is the device's default kernel.
OVERLOADS = ("", "reference", "cpu", "triton", "cuda")

_SCHEMAS = {
    "attention": ATTENTION,
    "cache_write": CACHE_WRITE,
    "block_ops": BLOCK_OPS,
    "step_end": STEP_END,
    "layers": LAYERS,
    "experts": EXPERTS,
    "mla": MLA,
    "indexer": INDEXER,
    "state": STATE,
}
#: The family that an op belongs to: its folder.
_FAMILY = {op: family for family, schemas in _SCHEMAS.items() for op in schemas}
SCHEMAS = {op: text for family in _SCHEMAS.values() for op, text in family.items()}

#: What makes an op's record out of its flat arguments; the Python functions behind these ops take it alone.
_RECORDS: dict[str, Callable[..., Any]] = {
    "paged_attention": AttentionCall.of,
    "cascade_attention": CascadeCall.of,
    "merge_attn_states": MergeCall,
    "mla_attention": LatentCall.of,
    "rope_write_latent": LatentWriteCall,
    "index_logits": IndexCall,
    "write_kv": WriteCall,
    "rope_write_kv": RotatedWriteCall,
    "advance_step": AdvanceCall,
    "sample_tokens": SampleCall,
    "accept_tokens": AcceptCall,
    "finish_step": FinishCall.of,
    "rms_norm": NormCall,
    "linear": LinearCall,
    "route_experts": RouteCall,
    "apply_experts": ExpertsCall,
    "causal_conv": ConvCall,
    "linear_attention": LinearAttentionCall,
    "delta_gates": GatesCall,
    "gated_rms_norm": GatedNormCall,
    "delta_step": DeltaStepCall,
}

#: Ops with a native C++ kernel. The others run their reference on a CPU, as the default and as the
#: .cpu overload, but for those of `_IN_PYTHON`.
NATIVE_OPS = frozenset(
    {
        "write_kv",
        "paged_attention",
        "merge_attn_states",
        "copy_blocks",
        "advance_step",
        "causal_conv",
        "linear_attention",
    }
)

#: Ops that a file ``cpu.py`` of their family makes of native ones, or of torch's.
_IN_PYTHON = frozenset({"mla_attention", "write_latent", "delta_step", "apply_experts"})


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
    record = _RECORDS.get(op)
    return function if record is None else lambda *args, **kwargs: function(record(*args, **kwargs))


def _lazy(module: str, function: str, of_torch: bool = False) -> Any:
    """A kernel whose module is imported at its first launch, so that importing torchpaged stays light;
    ``of_torch``: it consists of torch's ops."""
    cached: Any = None

    def launch(*args: Any, **kwargs: Any) -> None:
        nonlocal cached
        if cached is None:
            cached = _recorded(function, getattr(importlib.import_module(module), function))
            cached = apart_from_modes(cached) if of_torch else cached
        device = args[0].device
        foreign = device.type == "cuda" and device.index != torch.cuda.current_device()
        if foreign or launches.around is not None:
            with contextlib.ExitStack() as stack:
                if foreign:
                    # Python kernels get no device guard from the dispatcher
                    stack.enter_context(torch.cuda.device(device))
                if launches.around is not None:
                    stack.enter_context(launches.around(function, args))
                cached(*args, **kwargs)
            return
        cached(*args, **kwargs)

    launch.__name__ = function
    return launch


_CUDA_OPS = frozenset(
    {
        "paged_attention",
        "linear",
        "cascade_attention",
        "mla_attention",
        "index_logits",
        "top_k_indices",
        "linear_attention",
        "delta_step",
    }
)


def _of_this_gpu(op: str) -> Any:
    """The default kernel on a GPU: what the backend "auto" runs there, ``cuda`` if its compiler is here and
    ``triton`` if not."""
    kernels = {
        name: _lazy(f"torchpaged.custom_ops.{_FAMILY[op]}.{name}.{op}", op) for name in ("cuda", "triton")
    }
    chosen: Any = None

    def launch(*args: Any, **kwargs: Any) -> None:
        nonlocal chosen
        if chosen is None:
            jit = importlib.import_module("torchpaged.custom_ops.cuda.jit")
            chosen = kernels["cuda" if jit.unavailable() is None else "triton"]
        chosen(*args, **kwargs)

    launch.__name__ = op
    return launch


def _reference(op: str) -> Any:
    return _lazy(f"torchpaged.custom_ops.{_FAMILY[op]}.reference", op, of_torch=True)


def _nothing(*_: Any, **__: Any) -> None:
    """The fake kernel of an op without facts to state."""


_FAMILY_FAKES = (
    ATTENTION_FAKES,
    CACHE_WRITE_FAKES,
    STEP_END_FAKES,
    LAYERS_FAKES,
    MLA_FAKES,
    STATE_FAKES,
    INDEXER_FAKES,
    EXPERTS_FAKES,
)
#: Of each op that has facts to state, what a trace runs in its place, with flat arguments.
FAKES = {op: _recorded(op, fake) for fakes in _FAMILY_FAKES for op, fake in fakes.items()}


def _register() -> None:
    for op, schema in SCHEMAS.items():
        for overload in OVERLOADS:
            name = f"{op}.{overload}" if overload else op
            LIBRARY.define(name + schema, tags=_TAGS)
            torch.library.register_fake(f"torchpaged::{name}", FAKES.get(op, _nothing), lib=LIBRARY)
        reference = _reference(op)
        triton = _lazy(f"torchpaged.custom_ops.{_FAMILY[op]}.triton.{op}", op)
        LIBRARY.impl(f"{op}.reference", reference, "CompositeExplicitAutograd")
        LIBRARY.impl(f"{op}.triton", triton, "CompositeExplicitAutograd")
        cuda = _lazy(f"torchpaged.custom_ops.{_FAMILY[op]}.cuda.{op}", op) if op in _CUDA_OPS else triton
        LIBRARY.impl(f"{op}.cuda", cuda, "CompositeExplicitAutograd")
        LIBRARY.impl(op, _of_this_gpu(op) if op in _CUDA_OPS else triton, "CUDA")
    # Registers the default and the .cpu overload of these for the CPU key.
    loaded = native.load({op: SCHEMAS[op] for op in NATIVE_OPS})
    for op in SCHEMAS:
        reference = _reference(op)
        if not loaded:
            LIBRARY.impl(op, native.raise_absent if native.wrong else reference, "CPU")
            LIBRARY.impl(f"{op}.cpu", native.raise_absent, "CompositeExplicitAutograd")
        elif op not in NATIVE_OPS:
            module = f"torchpaged.custom_ops.{_FAMILY[op]}.cpu"
            kernel = _lazy(module, op, of_torch=True) if op in _IN_PYTHON else reference
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
