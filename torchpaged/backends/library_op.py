"""The attention op of a backend around a library: the contract of ``torchpaged::paged_attention`` in a
namespace of its own.

    OPS = attention_op("torchpaged_varlen", _attend, CAPABILITIES, "torch_varlen")
    OPS = attention_op("torchpaged_flash_attn", _attend, CAPABILITIES, "flash_attn", handle="Tensor?")

It traces as one call, captures as what it launches, and is held to the same facts by its fake kernel. What
its session keeps reaches it through the further arguments: tensors, or a handle, an int64 tensor on the CPU
that `Held` turns into the session.
"""

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from torchpaged.backends.capabilities import Capabilities, unable
from torchpaged.backends.features import COMMON_FEATURES
from torchpaged.backends.spec import GraphSupport, features_of
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.check import check_paged_attention
from torchpaged.custom_ops.attention.schema import SCHEMAS
from torchpaged.custom_ops.callers_modes import apart_from_modes
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError, ClosedError
from torchpaged.custom_ops.registry import FAKES

#: Kept for the life of the process: dropping one deregisters its op.
_LIBRARIES: dict[str, torch.library.Library] = {}
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_SEMAPHORE = ", Tensor(c!)? semaphore=None"
Kept = TypeVar("Kept")


def attention_op(
    namespace: str,
    kernel: Callable[..., None],
    able: Capabilities | None = None,
    name: str = "",
    **further: str,
) -> dict[str, Any]:
    """Define ``namespace::paged_attention`` with ``kernel`` behind it on every device.

    Args:
        namespace: of the op, new in this process.
        kernel: ``kernel(call, **further)``, run on a checked `AttentionCall` of features that the backend
            has, and never on an empty batch.
        able: what the backend declares; a call of other features is refused, and a capture where graph
            support is NEVER. None: everything but trees of drafts is the kernel's.
        name: of the backend, for messages; default: the namespace.
        further: types of keyword arguments, by name, in place of the contract's ``semaphore``, as a schema
            has them and None by default: what the session's workspace gives.

    Returns:
        The op's handle by its name, as `Backend` takes it.

    Raises:
        ArgumentError: the namespace is taken.
    """

    def launch(*tensors: Any, **options: Any) -> None:
        kept = {name: options.pop(name, None) for name in further}
        call = AttentionCall.of(*tensors, **options)
        _refuse(call, able, name or namespace)
        check_paged_attention(call)
        if not call.q.shape[0] or not call.block_table.numel():
            call.empty()
            return
        kernel(call, **kept)

    def fake(*tensors: Any, **options: Any) -> None:
        FAKES["paged_attention"](*tensors, **{k: x for k, x in options.items() if k not in further})

    contract = SCHEMAS["paged_attention"]
    assert _SEMAPHORE in contract, "the contract has changed"
    schema = contract.replace(_SEMAPHORE, "".join(f", {kind} {name}=None" for name, kind in further.items()))
    return defined(namespace, paged_attention=(schema, apart_from_modes(launch), fake))


def defined(namespace: str, **ops: tuple[str, Callable[..., None], Callable[..., None]]) -> dict[str, Any]:
    """Define ops in ``namespace``, each by its schema, what runs it on every device, and its fake kernel.

    Returns:
        The ops' handles by their names, as `Backend` takes them.

    Raises:
        ValueError: the namespace is taken.
    """
    if namespace in _LIBRARIES:
        raise ArgumentError("namespace", "a new one", repr(namespace))
    library = _LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
    for op, (schema, launch, fake) in ops.items():
        library.define(op + schema, tags=_TAGS)
        library.impl(op, launch, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{op}", fake, lib=library)
    return {op: getattr(getattr(torch.ops, namespace), op).default for op in ops}


def _refuse(call: AttentionCall, able: Capabilities | None, name: str) -> None:
    has = COMMON_FEATURES if able is None else able.features
    reasons = [f"{feature} is not supported" for feature in features_of(call) if feature not in has]
    if able is not None and able.graph_support == GraphSupport.NEVER and call.q.device.type == "cuda":
        reasons += ["graph support is NEVER"] if torch.cuda.is_current_stream_capturing() else []
    if reasons:
        raise unable(name, *reasons)


class Held(Generic[Kept]):
    """Objects that an op finds by a handle. They live as long as another object holds them.

    A handle is an int64 tensor on the CPU: part of a trace and of a call's arguments like every other tensor.
    Only the op's launch looks at it, so a replay never does.

    Args:
        what: the object's name, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what, self._last = what, 0
        self._kept: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, kept: Kept) -> Tensor:
        """A handle of ``kept``; its number is never used again."""
        self._last += 1
        self._kept[self._last] = kept
        with torch.inference_mode(False):
            return torch.tensor([self._last], dtype=torch.int64, device="cpu")

    def of(self, handle: Tensor | None) -> Kept:
        """What the handle stands for.

        Raises:
            BackendUnavailableError: none was given.
            ClosedError: the object is gone.
        """
        kept: Kept | None = None if handle is None else self._kept.get(int(handle))
        if kept is None:
            got = "None" if handle is None else f"one of a {self._what} that is closed"
            raise (BackendUnavailableError if handle is None else ClosedError)(
                f"handle: expected that of an open {self._what}, got {got}; pass **session.workspace(spec)"
            )
        return kept
