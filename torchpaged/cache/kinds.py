"""Kinds of layer cache: what a layer keeps per block, how its pools are made and copied, and how
HuggingFace's layers of that kind are cached.

    class LatentSpec(LayerSpec): ...                      # sizes of one layer; a dataclass
    register_layer_kind(LayerKind("latent", LatentSpec, hf_layer=make_layer))

A new kind is a file with these and one registration: `PagedKVCache`, `torchpaged.hf.PagedCache` and the
engine take layers of any kind, of several kinds in one model too. They share block ids: block 5 of a request
is block 5 in the pools of every layer that keeps blocks.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.errors import ArgumentError

#: Of each pool of a layer a block's shape, and its dtype.
BlockShapes: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]


class LayerSpec:
    """What one layer stores. Subclasses are frozen dataclasses of its sizes, equal where the layers
    are alike.

    Attributes:
        per_request: False: an entry of its pools is a block of tokens. True: it is all that a request keeps
            in this layer, however long it is; the hooks' blocks are these entries then, whose ids are the
            requests' (`PagedKVCache` makes ``max_num_reqs`` and entry 0, for padding).
    """

    per_request: ClassVar[bool] = False

    #: Of its pools: a NamedTuple of tensors, or None where a field is not used.
    POOLS: ClassVar[Callable[..., Any]]

    def block_shapes(self, block_size: int, dtype: torch.dtype) -> BlockShapes:
        """Shape and dtype of a block of ``block_size`` tokens in each of its pools, by their fields' names,
        where a cache's pools are of ``dtype``. What follows from it a kind may say itself instead."""
        raise NotImplementedError

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block in all pools together."""
        shapes = self.block_shapes(block_size, dtype).values()
        return sum(math.prod(shape) * kept.itemsize for shape, kept in shapes)

    def make_pools(self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Any:
        """The layer's pools: zeros. Called outside inference mode."""
        shapes = self.block_shapes(block_size, dtype).items()
        return self.POOLS(
            **{n: torch.zeros(num_blocks, *shape, dtype=kept, device=device) for n, (shape, kept) in shapes}
        )

    def block_tensors(self, pools: Any) -> dict[str, Tensor]:
        """Those of ``pools`` that hold blocks, ``[num_blocks, ...]``, by their field's name."""
        return {name: x for name, x in pools._asdict().items() if x is not None and x.numel()}

    def copy_blocks(self, pools: Any, block_mapping: Tensor, ops: BackendOps) -> None:
        """Copy whole blocks inside ``pools``.

        Args:
            pools: of `make_pools`.
            block_mapping: ``[n, 2]`` int64 on the pools' device, source and destination; no block is both.
            ops: of the backend that runs the layers.
        """
        source, destination = block_mapping.unbind(1)
        for tensor in self.block_tensors(pools).values():
            tensor.index_copy_(0, destination, tensor.index_select(0, source))


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer cache.

    Attributes:
        name: for messages.
        spec: the class of its layers' specs.
        hf_layer: makes the layer of a `torchpaged.hf.PagedCache`: called as
            ``hf_layer(owner, index, config, template)`` with the cache, the layer's index, the model's text
            config and the layer that transformers' ``StaticCache`` has there. It gives a
            `torchpaged.hf.layer.PagedLayer`, or None where the layer is of another kind. None: no layer of
            transformers is of this kind.
    """

    name: str
    spec: type[LayerSpec]
    hf_layer: Callable[[Any, int, Any, Any], Any] | None = None


_KINDS: dict[str, LayerKind] = {}


def register_layer_kind(kind: LayerKind) -> None:
    """Make ``kind`` known; of several whose ``hf_layer`` takes a layer, the one registered first has it.

    Raises:
        ArgumentError: the name or the class of specs is taken.
    """
    taken = next((k for k in _KINDS.values() if k.name == kind.name or k.spec is kind.spec), None)
    if taken is not None:
        raise ArgumentError("kind", "a name and a class of specs of its own", f"those of kind {taken.name!r}")
    _KINDS[kind.name] = kind


def layer_kinds() -> tuple[LayerKind, ...]:
    """All kinds, in the order of their registration."""
    return tuple(_KINDS.values())


def kind_of(spec: Any) -> LayerKind:
    """The kind of a layer's spec.

    Raises:
        ArgumentError: its class is not registered.
    """
    for kind in _KINDS.values():
        if type(spec) is kind.spec:
            return kind
    raise ArgumentError(
        "layers",
        f"specs of registered kinds ({', '.join(_KINDS)})",
        type(spec).__name__,
        "call torchpaged.cache.register_layer_kind",
    )


def memory_of(device: torch.device) -> int | None:
    """Bytes of memory that ``device`` has, used or not; None where that can't be told."""
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
