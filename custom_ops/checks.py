"""Checks of one argument: dimensions, dtype, device, strides; and whether values may be read.

Shapes, dtypes, devices and strides are checked always (no device work). Values that live on a device (block
ids, slots, lengths) can only be checked by reading them: on the CPU that is done always, on a GPU only with
``TORCHPAGED_CHECK=1``, because it synchronises.
"""

import contextlib
import math
import numbers
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import _is_functional_tensor as is_functional
from torch._C._functorch import is_batchedtensor as is_batched
from torch._subclasses import FakeTensor
from torch.autograd.forward_ad import unpack_dual

from torchpaged.custom_ops import variables
from torchpaged.custom_ops.errors import ArgumentError

T = TypeVar("T")
#: Activations of a gate that the ops know; "gelu_tanh" is GELU's tanh approximation.
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def shape_of(tensor: Tensor) -> str:
    """For a message; a trace can't make one of a list of symbols."""
    return "[" + ", ".join([f"{size}" for size in tensor.shape]) + "]"


def is_int(value: object) -> bool:
    """Whether ``value`` is an integer of Python or NumPy; booleans are none."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def check_sizes(least: int = 1, **sizes: object) -> None:
    """Each is an int of at least ``least``."""
    for name, size in sizes.items():
        if not is_int(size) or size < least:  # type: ignore[operator]
            raise ArgumentError(name, f"an int of at least {least}", repr(size))


def check_is_dtype(**dtypes: object) -> None:
    """Each is a dtype of torch, not its name."""
    for name, dtype in dtypes.items():
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError(name, "a torch.dtype, such as torch.bfloat16", repr(dtype))


def device_here(device: Any) -> torch.device:
    """``device`` as a `torch.device` that this torch can allocate on."""
    try:
        made = torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError("device", "a torch.device or its name, such as 'cuda'", repr(device)) from None
    # a batch is made in every step: what is initialised is there, which is asked in a tenth of the time
    if made.type == "cuda" and not torch.cuda.is_initialized() and not torch.cuda.is_available():
        raise ArgumentError("device", "a device of this machine", repr(str(made)), no_cuda())
    return made


def no_cuda() -> str:
    """Why there is no GPU here."""
    built = torch.version.cuda is not None or torch.version.hip is not None
    return "torch finds no driver or no GPU" if built else "this torch is built without CUDA"


def switch(name: str, value: object, *others: str | None) -> None:
    """``value`` is True, False or one of ``others``. 1, 0 and NumPy's booleans are none of them: code that
    asks with ``is`` would take them for neither."""
    if isinstance(value, bool) or any(type(value) is type(other) and value == other for other in others):
        return
    *most, last = (True, False, *others)
    converts = value is not None and hasattr(value, "__bool__")
    raise ArgumentError(
        name,
        f"{', '.join(map(repr, most))} or {last!r}",
        repr(value),
        f"convert the {type(value).__name__} with bool(...)" if converts else "",
    )


def check_softmax(scale: object, logits_soft_cap: object = 0) -> None:
    """The numbers that scores are scaled and capped by, as kernels hold them: in float32, by which a cap
    is divided, too."""
    if not 0 < _number(scale) <= 3.4028234663852886e38:
        raise ArgumentError("scale", "a positive number that float32 holds", repr(scale))
    cap = _number(logits_soft_cap)
    if cap != 0 and not 1e-30 <= cap <= 1e30:
        raise ArgumentError("logits_soft_cap", "0 (off) or a number in [1e-30, 1e30]", repr(logits_soft_cap))


def _number(value: Any) -> float:
    """NaN of what is none."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a list, a tensor of several, 10**400
        return math.nan


def check_callable(name: str, value: object, called: str, optional: bool = True) -> None:
    """``value`` can be called, as ``called`` shows, or is None where it is ``optional``."""
    if not callable(value) and not (optional and value is None):
        wanted = f"a function, called as {called}" + (", or None" if optional else "")
        raise ArgumentError(name, wanted, repr(value))


def given(**values: T | None) -> dict[str, T]:
    """Those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def check_tensors(**tensors: object) -> None:
    """All of these are tensors, not lists or None, and have memory: values and addresses are checked, which
    fake, functional, sparse and vmap's tensors have none of. Not asked in a trace, which has no others."""
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if type(tensor) is Tensor and _address(tensor):  # most are
            continue
        # None of the three is public; tests/project/test_meta_device.py notices a change.
        if isinstance(tensor, FakeTensor) or (isinstance(tensor, Tensor) and is_functional(tensor)):
            raise ArgumentError(
                name,
                "a tensor with memory",
                "a fake or functional one",
                "trace the call with torch.compile or torch.export, or call the ops in torch.ops.torchpaged",
            )
        if not isinstance(tensor, Tensor):
            raise ArgumentError(
                name,
                "a tensor",
                type(tensor).__name__,
                "make one with torch.tensor(...)" if tensor is not None else "",
            )
        if tensor.layout is not torch.strided:
            raise ArgumentError(name, "a dense tensor", str(tensor.layout), "convert it with .to_dense()")
        if is_batched(tensor):
            fix = "make one call of all requests: rows of a batch are packed"
            raise ArgumentError(name, "a tensor with memory", "one of torch.vmap", fix)


def _address(tensor: Tensor) -> int:
    """0 where there is no memory, or none that has an address."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def check_dims(name: str, tensor: Tensor, *dims: int | None) -> None:
    """``tensor`` has ``len(dims)`` dimensions with these sizes; None accepts any size."""
    shape = tensor.shape
    if shape == dims:  # most calls end here
        return
    if len(shape) == len(dims):
        for want, size in zip(dims, shape, strict=True):
            if want is not None and want != size:
                break
        else:
            return
    expected = "[" + ", ".join("*" if d is None else str(d) for d in dims) + "]"
    raise ArgumentError(name, f"shape {expected}", shape_of(tensor))


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """``tensor`` has one of ``dtypes``."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(dict.fromkeys(map(str, dtypes)))
        raise ArgumentError(name, expected, str(tensor.dtype), f"convert with .to({dtypes[0]})")


def check_tensor(name: str, tensor: Tensor, dims: Sequence[int | None], *dtypes: torch.dtype) -> None:
    """``tensor`` has the sizes ``dims`` (None: any), one of ``dtypes`` and a contiguous last dimension."""
    check_dims(name, tensor, *dims)
    check_dtype(name, tensor, *dtypes)
    if tensor.stride(-1) != 1:
        check_last_dim(**{name: tensor})


def check_device(device: torch.device, **tensors: Tensor | None) -> None:
    """All ``tensors`` that are given live on ``device``."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ArgumentError(
                name, f"device {device}", str(tensor.device), f"move it with .to({str(device)!r})"
            )


def check_last_dim(**tensors: Tensor) -> None:
    """The last dimension of each tensor is contiguous (the others may have any stride)."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ArgumentError(
                name,
                "a contiguous last dimension (stride 1)",
                f"strides {tensor.stride()}",
                "call .contiguous()",
            )


_suspended = 0


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Within the block no values are read: a step that is being captured, even on a CPU, must not look
    at them."""
    global _suspended
    _suspended += 1
    try:
        yield
    finally:
        _suspended -= 1


def reads_values(device: torch.device) -> bool:
    """Whether values on ``device`` are checked: always on a CPU, with ``TORCHPAGED_CHECK=1`` on a GPU, never
    during a capture."""
    if _suspended:
        return False
    asked_for = checks_device_values()  # read on a CPU as well: an invalid value raises everywhere
    if device.type == "cpu":
        return True
    return asked_for and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def checks_device_values() -> bool:
    """Whether ``TORCHPAGED_CHECK=1`` asks for checks that synchronise; raises `ValueError` if the variable is
    neither 0 nor 1."""
    return bool(variables.get("TORCHPAGED_CHECK"))


def refuse_grad(**tensors: Tensor | None) -> None:
    """Raise `ArgumentError` if grad mode is on and a tensor requires grad, or if it carries a tangent of
    forward-mode AD (``torch.func.jvp`` too): these ops have no derivative, and would drop it. In a trace
    too."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                name,
                "a tensor without grad (paged attention is for inference)",
                "requires_grad=True",
                "run under torch.inference_mode() or torch.no_grad()",
            )
        if unpack_dual(tensor).tangent is not None:  # no_grad() does not stop it
            raise ArgumentError(
                name,
                "a tensor without a tangent (paged attention is for inference)",
                "a dual tensor of forward-mode AD",
                "run under torch.inference_mode(), or pass unpack_dual(tensor).primal",
            )
