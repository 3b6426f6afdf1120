"""The attention op of a backend around a library: the contract of ``torchpaged::paged_attention`` in a namespace of its own.

    OPS = attention_op("torchpaged_flex", _attend, "Tensor? mods=None")

It traces as one call, captures as what it launches, and is held to the same facts by its fake kernel. What its session keeps
reaches it through the further arguments: tensors, or a handle, an int64 tensor on the CPU that `Held` turns into the session.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.fake import FAKES
from torchpaged.custom_ops.attention.schema import SCHEMAS

_LIBRARIES: dict[str, torch.library.Library] = {}  # kept for the life of the process: dropping one deregisters its op
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_SEMAPHORE = ", Tensor(c!)? semaphore=None"
Kept = TypeVar("Kept")


def attention_op(namespace: str, kernel: Callable[..., None], further: str = "") -> dict[str, Any]:
    """Define ``namespace::paged_attention`` with ``kernel`` behind it on every device; returns it as `Backend` takes ops.

    Args:
        namespace: of the op, new in this process.
        kernel: takes what the schema says, by the contract of `torchpaged.custom_ops.registry`.
        further: keyword arguments in place of the contract's ``semaphore``, as a schema has them: what the session's workspace gives.

    Raises:
        ValueError: the namespace is taken.
    """
    if namespace in _LIBRARIES:
        raise ValueError(f"namespace: expected a new one, got {namespace!r}")
    contract = SCHEMAS["paged_attention"]
    assert _SEMAPHORE in contract, "the contract has changed"
    library = _LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
    schema = contract.replace(_SEMAPHORE, f", {further}" if further else "")
    library.define("paged_attention" + schema, tags=_TAGS)
    library.impl("paged_attention", kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::paged_attention", FAKES["paged_attention"], lib=library)
    return {"paged_attention": getattr(torch.ops, namespace).paged_attention.default}


class Held(Generic[Kept]):
    """Objects that an op finds by a handle. They live as long as somebody else holds them.

    A handle is an int64 tensor on the CPU: part of a trace and of a call's arguments like every other tensor. Only the op's
    launch looks at it, so a replay never does.
    """

    def __init__(self, what: str) -> None:
        self._what, self._next = what, 0
        self._kept: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()  # type: ignore[type-var]

    def add(self, kept: Kept) -> Tensor:
        """A handle of ``kept``; the number is never used again."""
        self._next += 1
        self._kept[self._next] = kept
        with torch.inference_mode(False):
            return torch.tensor([self._next], dtype=torch.int64)

    def of(self, handle: Tensor | None) -> Kept:
        """What the handle stands for.

        Raises:
            RuntimeError: none was given, or the object is gone.
        """
        kept = None if handle is None else self._kept.get(int(handle))
        if kept is None:
            got = "None" if handle is None else f"one of a {self._what} that is closed"
            raise RuntimeError(f"handle: expected that of an open {self._what}, got {got}; pass **session.workspace(spec)")
        return kept
