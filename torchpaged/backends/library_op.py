"""The attention op of a backend around a library: the contract of ``torchpaged::paged_attention`` in a
namespace of its own.

    OPS = attention_op("torchpaged_flex", _attend)
    OPS = attention_op("torchpaged_flash_attn", _attend, handle="Tensor?")

It traces as one call, captures as what it launches, and is held to the same facts by its fake kernel. What
its session keeps reaches it through the further arguments: tensors, or a handle, an int64 tensor on the CPU
that `Held` turns into the session.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.check import check_paged_attention
from torchpaged.custom_ops.attention.fake import FAKES
from torchpaged.custom_ops.attention.schema import SCHEMAS
from torchpaged.custom_ops.errors import ArgumentError

#: Kept for the life of the process: dropping one deregisters its op.
_LIBRARIES: dict[str, torch.library.Library] = {}
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_SEMAPHORE = ", Tensor(c!)? semaphore=None"
Kept = TypeVar("Kept")


class Call(NamedTuple):
    """The tensors of a call, as the contract has them (`torchpaged.custom_ops.registry`)."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    out: Tensor
    lse: Tensor | None = None


class Options(NamedTuple):
    """The options of a call, without the contract's ``semaphore`` and ``tree_mask``, which is refused."""

    max_query_len: int
    scale: float
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    logits_soft_cap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    chunk_size: int = 0


def attention_op(namespace: str, kernel: Callable[..., None], **further: str) -> dict[str, Any]:
    """Define ``namespace::paged_attention`` with ``kernel`` behind it on every device.

    Args:
        namespace: of the op, new in this process.
        kernel: ``kernel(call, options, **further)``, run on checked arguments and never on an empty batch;
            its ``call`` is a `Call`, its ``options`` are `Options`.
        further: types of keyword arguments, by name, in place of the contract's ``semaphore``, as a schema
            has them and None by default: what the session's workspace gives.

    Returns:
        The op's handle by its name, as `Backend` takes it.

    Raises:
        ValueError: the namespace is taken.
    """
    if namespace in _LIBRARIES:
        raise ValueError(f"namespace: expected a new one, got {namespace!r}")

    def launch(*arguments: Any, **keywords: Any) -> None:
        call, kept = Call(*arguments), {name: keywords.pop(name, None) for name in further}
        refuse_tree(namespace, keywords.pop("tree_mask", None))
        options = Options(**keywords)
        check_paged_attention(*call, **options._asdict())
        if not call.q.shape[0] or not call.block_table.numel():
            call.out.zero_()
            if call.lse is not None:
                call.lse.fill_(float("-inf"))
            return
        kernel(call, options, **kept)

    contract = SCHEMAS["paged_attention"]
    assert _SEMAPHORE in contract, "the contract has changed"
    schema = contract.replace(_SEMAPHORE, "".join(f", {kind} {name}=None" for name, kind in further.items()))
    library = _LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
    library.define("paged_attention" + schema, tags=_TAGS)
    library.impl("paged_attention", launch, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::paged_attention", FAKES["paged_attention"], lib=library)
    return {"paged_attention": getattr(torch.ops, namespace).paged_attention.default}


def refuse_tree(name: str, tree_mask: Tensor | None) -> None:
    """Refuse a tree mask for the op of a backend that declares to take none; raises `ArgumentError`."""
    if tree_mask is not None:
        raise ArgumentError(
            "tree_mask",
            f"None: {name} attends without one",
            "a tensor",
            "choose a backend that declares tree_mask (torchpaged backends)",
        )


class Held(Generic[Kept]):
    """Objects that an op finds by a handle. They live as long as somebody else holds them.

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
            RuntimeError: none was given, or the object is gone.
        """
        kept: Kept | None = None if handle is None else self._kept.get(int(handle))
        if kept is None:
            got = "None" if handle is None else f"one of a {self._what} that is closed"
            raise RuntimeError(
                f"handle: expected that of an open {self._what}, got {got}; pass **session.workspace(spec)"
            )
        return kept
